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
	failed  []trouble
	stalled []trouble
	next    time.Time   // when to tell again at the soonest
	timer   *time.Timer // runs tellLater
}

// trouble is what became of a member of a quorum.
type trouble struct {
	quorumID  int64
	replicaID string
	reason    string
}

func (n *news) pending() int { return len(n.failed) + len(n.stalled) }

// announce tells every member of the failures and stalls among actions, at once or in a moment together with those that
// follow. The caller holds mu.
func (j *job) announce(actions []quorum.Action, now time.Time) {
	before := j.news.pending()
	for _, action := range actions {
		switch a := action.(type) {
		case quorum.Failed:
			j.board.Failed(a.Cause)
			j.news.failed = append(j.news.failed, trouble{a.QuorumID, a.ReplicaID, a.Reason})
		case quorum.Stalled:
			j.news.stalled = append(j.news.stalled, trouble{a.QuorumID, a.ReplicaID, a.Reason})
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
	failed, stalled := j.news.failed, j.news.stalled
	j.news.failed, j.news.stalled = nil, nil
	messages := j.words("torchft: a member failed", failed, func(t trouble) *torchftpb.LighthouseMessage {
		return &torchftpb.LighthouseMessage{Message: &torchftpb.LighthouseMessage_MemberFailed{
			MemberFailed: &torchftpb.MemberFailed{QuorumId: t.quorumID, ReplicaId: t.replicaID, Reason: t.reason},
		}}
	})
	messages = append(messages, j.words("torchft: a member makes no progress", stalled, func(t trouble) *torchftpb.LighthouseMessage {
		return &torchftpb.LighthouseMessage{Message: &torchftpb.LighthouseMessage_MemberStalled{
			MemberStalled: &torchftpb.MemberStalled{QuorumId: t.quorumID, ReplicaId: t.replicaID, Reason: t.reason},
		}}
	})...)
	if len(failed) > 0 {
		j.board.Record(dashboard.Event{
			Time: now, Kind: dashboard.MemberFailed, QuorumID: failed[0].quorumID, Left: whose(failed), Reason: failed[0].reason,
		})
	}
	j.news.next = now.Add(time.Duration(len(j.streams.open)) * tellPause)
	for one := range j.streams.open {
		one.post(outgoing{news: messages})
	}
}

// words logs troubles of one kind, and returns what members are told of them.
func (j *job) words(what string, troubles []trouble, word func(trouble) *torchftpb.LighthouseMessage) (messages []rpc.Encoded) {
	if len(troubles) == 0 {
		return nil
	}
	j.log.Warn(what, "quorum_id", troubles[0].quorumID, "member", some(whose(troubles)), "reason", troubles[0].reason)
	for _, t := range troubles[:min(len(troubles), tellMost)] {
		messages = append(messages, wordOf(word(t))...)
	}
	return messages
}

func whose(troubles []trouble) []string {
	names := make([]string, len(troubles))
	for i, t := range troubles {
		names[i] = t.replicaID
	}
	return names
}
