package lighthouse

import (
	"time"

	"github.com/torchft/torchft/go/dashboard"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

const (
	// tellPause is for how long, for each stream, nobody is told anything further after some news. Telling all costs about
	// half of it, so a storm (a rack that loses power or hangs, the end of a large job) leaves the lighthouse time for
	// its work. With 10,000 groups it is 20 ms.
	tellPause = 2 * time.Microsecond
	// tellMost is how many failures, and how many stalled members, everybody is told of at once: one is enough to know that
	// a quorum is broken, or held up.
	tellMost = 32
)

// news are the members that failed or stalled of whom all are still to be told. The job's lock guards them.
type news struct {
	failed  []quorum.Failed
	stalled []quorum.Stalled
	next    time.Time   // when to tell again at the soonest
	timer   *time.Timer // runs tellLater
}

func (n *news) pending() int { return len(n.failed) + len(n.stalled) }

// announce tells every member of the failures and stalls among actions, at once or in a moment together with those that
// follow. The caller holds mu.
func (j *job) announce(actions []quorum.Action, now time.Time) {
	before := j.news.pending()
	for _, action := range actions {
		switch a := action.(type) {
		case quorum.Failed:
			j.news.failed = append(j.news.failed, a)
		case quorum.Stalled:
			j.news.stalled = append(j.news.stalled, a)
		}
	}
	if j.news.pending() == before {
		return
	}
	if pause := j.news.next.Sub(now); pause > 0 {
		j.news.timer.Reset(pause)
		return
	}
	j.tell(now)
}

func (j *job) tellLater() {
	j.mu.Lock()
	defer j.mu.Unlock()
	if !j.closed && j.news.pending() > 0 {
		j.tell(time.Now())
	}
}

func (j *job) tell(now time.Time) {
	messages := append(j.tellFailed(now), j.tellStalled()...)
	j.news.next = now.Add(time.Duration(len(j.streams.open)) * tellPause)
	for one := range j.streams.open {
		one.post(outgoing{news: messages})
	}
}

// tellFailed logs and records the failures, and returns what members are told of them.
func (j *job) tellFailed(now time.Time) (messages []rpc.Encoded) {
	failed := j.news.failed
	j.news.failed = nil
	if len(failed) == 0 {
		return nil
	}
	names := make([]string, len(failed))
	for i, f := range failed {
		names[i] = f.ReplicaID
		j.board.Failed(f.Cause)
	}
	j.log.Warn("torchft: a member failed", "quorum_id", failed[0].QuorumID, "member", some(names), "reason", failed[0].Reason)
	j.board.Record(dashboard.Event{Time: now, Kind: dashboard.MemberFailed, QuorumID: failed[0].QuorumID, Left: names, Reason: failed[0].Reason})
	for _, f := range failed[:min(len(failed), tellMost)] {
		messages = append(messages, wordOf(&torchftpb.LighthouseMessage{Message: &torchftpb.LighthouseMessage_MemberFailed{
			MemberFailed: &torchftpb.MemberFailed{QuorumId: f.QuorumID, ReplicaId: f.ReplicaID, Reason: f.Reason},
		}})...)
	}
	return messages
}

// tellStalled does the same for members that make no progress.
func (j *job) tellStalled() (messages []rpc.Encoded) {
	stalled := j.news.stalled
	j.news.stalled = nil
	if len(stalled) == 0 {
		return nil
	}
	names := make([]string, len(stalled))
	for i, s := range stalled {
		names[i] = s.ReplicaID
	}
	j.log.Warn("torchft: a member makes no progress", "quorum_id", stalled[0].QuorumID, "member", some(names), "reason", stalled[0].Reason)
	for _, s := range stalled[:min(len(stalled), tellMost)] {
		messages = append(messages, wordOf(&torchftpb.LighthouseMessage{Message: &torchftpb.LighthouseMessage_MemberStalled{
			MemberStalled: &torchftpb.MemberStalled{QuorumId: s.QuorumID, ReplicaId: s.ReplicaID, Reason: s.Reason},
		}})...)
	}
	return messages
}
