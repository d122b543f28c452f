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

// regresses reports to all members that the weights of later steps are lost, unless their groups come back.
// The caller holds mu.
func (j *job) regresses(a quorum.Regressed, now time.Time) {
	j.log.Warn("torchft: THE JOB REGRESSES: its weights of later steps are lost unless their groups "+
		"come back", "quorum_id", a.Quorum.ID, "reason", a.Reason)
	j.board.Record(dashboard.Event{Time: now, Kind: dashboard.Regressed, QuorumID: a.Quorum.ID,
		Step: a.Quorum.MaxStep(), Reason: a.Reason})
	j.tell(encodeNews(noticeMessage(&torchftpb.Notice{Kind: torchftpb.Notice_REGRESSED, QuorumId: a.Quorum.ID,
		Reason: a.Reason})))
}

// straggles logs and records a member that is slower than the others. The caller holds mu.
func (j *job) straggles(a quorum.Straggles, now time.Time) {
	j.log.Warn("torchft: a member is slower than the others", "replica_id", a.ReplicaID, "reason", a.Reason)
	j.board.Record(dashboard.Event{Time: now, Kind: dashboard.Straggler, QuorumID: a.QuorumID,
		Left: []string{a.ReplicaID}, Reason: a.Reason})
}

// corrupted logs and records groups whose gradients of the same unit differ, once: all groups report it.
func (j *job) corrupted(c *torchftpb.Corrupted) {
	names, reason := dashboard.Names(c.GetReplicaIds()), shortened(c.GetReason())
	for i, name := range names {
		names[i] = shortened(name)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if !j.once(reason) {
		return
	}
	j.log.Error("torchft: A GRADIENT IS CORRUPTED", "members", names, "reason", reason)
	j.board.Record(dashboard.Event{Time: time.Now(), Kind: dashboard.Corrupted, Left: names, Reason: reason})
}

// stops reports to all members that the job stops. The caller holds mu.
func (j *job) stops(a quorum.Stops, now time.Time) {
	j.log.Error("torchft: THE JOB STOPS: an exception would end it again and again", "reason", a.Reason)
	j.board.Record(dashboard.Event{Time: now, Kind: dashboard.Stopped, Reason: a.Reason})
	j.tell(encodeNews(noticeMessage(&torchftpb.Notice{Kind: torchftpb.Notice_STOPPED, Reason: a.Reason})))
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

// refuses logs and records a member that does not fit to the job, once: its manager repeats the request. The
// caller holds mu.
func (j *job) refuses(a quorum.Refused, now time.Time) {
	if !j.once(a.ReplicaID) {
		return
	}
	j.log.Warn("torchft: a member is refused", "replica_id", a.ReplicaID, "reason", a.Reason)
	j.board.Record(dashboard.Event{Time: now, Kind: dashboard.Refused, Left: []string{a.ReplicaID},
		Reason: a.Reason})
}
