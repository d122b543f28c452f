package lighthouse

import (
	"context"
	"log/slog"
	"time"

	"github.com/torchft/torchft/go/dashboard"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

const (
	// newsPause, multiplied by the number of streams, is the pause after news was sent to all members.
	// Sending takes about half of it. So in a burst of failures (a rack loses power or hangs, a large job
	// ends) the lighthouse has time for its other work. With 10,000 groups the pause is 20 ms.
	newsPause = 2 * time.Microsecond
	// mostNews bounds how many failed members are reported to all members at a time, and likewise how many
	// ended and how many stalled ones. One of them is enough to show that a quorum is broken or delayed.
	mostNews = 32
)

// news has the notices that have not been sent to all members yet, by kind. The job's lock guards it.
type news struct {
	pending [kinds][]*torchftpb.Notice
	next    time.Time   // the earliest time of the next report
	timer   *time.Timer // runs sendLater
}

// The kinds of news.
const (
	failedNews = iota
	endedNews
	partedNews
	stalledNews

	kinds // number of them
)

// kindsOfNews has the line of the log for each kind, and the event in the history if there is one.
var kindsOfNews = [kinds]struct {
	level slog.Level
	line  string
	event dashboard.Kind
}{
	failedNews:  {slog.LevelWarn, "torchft: a member failed", dashboard.MemberFailed},
	endedNews:   {slog.LevelInfo, "torchft: a member ended", dashboard.MemberEnded},
	partedNews:  {slog.LevelInfo, "torchft: a member has left the quorum, and asks for another one", ""},
	stalledNews: {slog.LevelWarn, "torchft: a member makes no progress", dashboard.MemberStalled},
}

// announce reports the failures and stalls among the actions to every member: at once or, during the pause
// after the last report (newsPause), at the end of the pause, together with all others of that time. The
// caller holds mu.
func (j *job) announce(actions []quorum.Action, now time.Time) {
	fresh := false
	add := func(kind int, n *torchftpb.Notice) {
		j.news.pending[kind], fresh = append(j.news.pending[kind], n), true
	}
	for _, action := range actions {
		switch a := action.(type) {
		case quorum.Failed:
			// in each case the peers must stop waiting for it
			n := &torchftpb.Notice{Kind: torchftpb.Notice_MEMBER_FAILED, QuorumId: a.QuorumID,
				ReplicaId: a.ReplicaID, Reason: a.Reason, Step: a.Step}
			switch a.Cause {
			case quorum.ShutDown:
				add(endedNews, n)
			case quorum.Parts:
				add(partedNews, n)
			default:
				j.board.Failed(a.Cause)
				if a.Cause == quorum.NoProgress {
					evicted := &torchftpb.Notice{Kind: torchftpb.Notice_EVICTED, Reason: a.Reason}
					j.streams.notify(evicted, a.ReplicaID)
				}
				add(failedNews, n)
			}
		case quorum.Stalled:
			add(stalledNews, &torchftpb.Notice{Kind: torchftpb.Notice_STALLED, QuorumId: a.QuorumID,
				ReplicaId: a.ReplicaID, Reason: a.Reason})
		}
	}
	if !fresh {
		return
	}
	if pause := j.news.next.Sub(now); pause > 0 {
		j.news.timer.Reset(pause)
		return
	}
	j.sendNews(now)
}

func (j *job) sendLater() {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.ended == nil {
		j.sendNews(time.Now())
	}
}

// sendNews sends the pending reports to all members, and logs and records them. The caller holds mu.
func (j *job) sendNews(now time.Time) {
	pending := j.news.pending
	j.news.pending = [kinds][]*torchftpb.Notice{}
	var messages []rpc.Encoded
	for kind, of := range pending {
		if len(of) == 0 {
			continue
		}
		names := make([]string, len(of))
		for i, n := range of {
			names[i] = n.GetReplicaId()
		}
		k, id, reason := kindsOfNews[kind], of[0].GetQuorumId(), of[0].GetReason()
		j.log.Log(context.Background(), k.level, k.line, "quorum_id", id, "member", dashboard.Names(names),
			"reason", reason)
		if k.event != "" {
			j.board.Record(dashboard.Event{Time: now, Kind: k.event, QuorumID: id, Left: names,
				Reason: reason})
		}
		for _, n := range of[:min(len(of), mostNews)] {
			messages = append(messages, encodeNews(noticeMessage(n))...)
		}
	}
	if len(messages) == 0 {
		return
	}
	j.news.next = now.Add(time.Duration(j.streams.open) * newsPause)
	j.tell(messages)
}

// tell sends messages to all members, after the quorums that were formed before: they may be about such a
// quorum. The caller holds mu.
func (j *job) tell(messages []rpc.Encoded) {
	j.onceKept(func() {
		for one := range j.streams.all() {
			one.post(messages)
		}
	})
}

// subjects has the line of the log for each subject of a report, the event in the history if there is one,
// and the notice to all members if they are told.
var subjects = map[quorum.Subject]struct {
	level  slog.Level
	line   string
	event  dashboard.Kind
	notice torchftpb.Notice_Kind
}{
	quorum.ClaimDoubted:    {slog.LevelWarn, "a report of a member is ignored", "", 0},
	quorum.MemberRefused:   {slog.LevelWarn, "a member is refused", dashboard.Refused, 0},
	quorum.MemberStraggles: {slog.LevelWarn, "a member is slower than the others", dashboard.Straggler, 0},
	quorum.QuorumAwaited:   {slog.LevelInfo, "no quorum yet", dashboard.NoQuorum, 0},
	quorum.CopyAwaited: {slog.LevelWarn,
		"NO QUORUM YET: it would begin before copies of the state that hosts hold", dashboard.NoQuorum, 0},
	quorum.JobRegressed: {slog.LevelWarn,
		"THE JOB REGRESSES: its weights of later steps are lost unless their groups come back",
		dashboard.Regressed, torchftpb.Notice_REGRESSED},
	quorum.JobStops: {slog.LevelError, "THE JOB STOPS: an exception would end it again and again",
		dashboard.Stopped, torchftpb.Notice_STOPPED},
	quorum.UnitSkipped: {slog.LevelError, "a unit of a batch is left out", dashboard.Skipped, 0},
}

// report logs and records what the machine reports. The caller holds mu.
func (j *job) report(r quorum.Report, now time.Time) {
	if r.What == quorum.MemberRefused && !j.once(r.ReplicaID) { // its manager repeats the request
		return
	}
	s := subjects[r.What]
	about := []any{"reason", r.Reason}
	e := dashboard.Event{Time: now, Kind: s.event, QuorumID: r.QuorumID, Step: r.Step, Reason: r.Reason}
	if r.ReplicaID != "" {
		about, e.Left = append(about, "replica_id", r.ReplicaID), []string{r.ReplicaID}
	}
	if r.QuorumID != 0 {
		about = append(about, "quorum_id", r.QuorumID)
	}
	j.log.Log(context.Background(), s.level, "torchft: "+s.line, about...)
	if s.event != "" {
		j.board.Record(e)
	}
	if s.notice != 0 {
		j.tell(encodeNews(noticeMessage(&torchftpb.Notice{Kind: s.notice, QuorumId: r.QuorumID,
			Reason: r.Reason})))
	}
}

// mostTold is how much is remembered as told: a group that is restarted after each refusal has a new name
// each time.
const mostTold = 1000

// once reports whether something is to be logged and recorded, since it was not yet. The caller holds mu.
func (j *job) once(what string) bool {
	if j.told[what] {
		return false
	}
	if len(j.told) == mostTold {
		clear(j.told)
	}
	j.told[what] = true
	return true
}

// perMinute counts what happened since a minute began.
type perMinute struct {
	began time.Time
	n     int
}

// admit counts one more, and reports whether there were at most this many in the minute.
func (c *perMinute) admit(most int, now time.Time) bool {
	if now.Sub(c.began) >= time.Minute {
		*c = perMinute{began: now}
	}
	c.n++
	return c.n <= most
}
