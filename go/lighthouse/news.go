package lighthouse

import (
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/torchft/torchft/go/dashboard"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

const (
	// tellPause is for how long, for each stream, nobody is told of a further failure after one. Telling all costs about
	// half of it, so a storm of failures (a rack that loses power, the end of a large job) leaves the lighthouse time for
	// its work. With 10,000 groups it is 20 ms.
	tellPause = 2 * time.Microsecond
	// tellMost is how many failures everybody is told of at once: one is enough to know that a quorum is broken.
	tellMost = 32
)

// news are the failures that members are still to be told of. The server's lock guards them.
type news struct {
	pending []quorum.Failed
	next    time.Time   // when to tell again at the soonest
	timer   *time.Timer // runs tellLater
}

// announce tells every member of the failures among actions, at once or in a moment together with those that follow. The
// caller holds mu.
func (j *job) announce(actions []quorum.Action, now time.Time) {
	before := len(j.news.pending)
	for _, action := range actions {
		if f, ok := action.(quorum.Failed); ok {
			j.news.pending = append(j.news.pending, f)
		}
	}
	if len(j.news.pending) == before {
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
	if !j.closed && len(j.news.pending) > 0 {
		j.tell(time.Now())
	}
}

func (j *job) tell(now time.Time) {
	pending := j.news.pending
	j.news.pending = nil
	j.news.next = now.Add(time.Duration(len(j.streams.open)) * tellPause)

	names := make([]string, len(pending))
	for i, f := range pending {
		names[i] = f.ReplicaID
	}
	j.log.Warn("torchft: a member failed", "quorum_id", pending[0].QuorumID, "member", some(names), "reason", pending[0].Reason)

	j.board.Record(dashboard.Event{Time: now, Kind: dashboard.MemberFailed, QuorumID: pending[0].QuorumID, Left: names, Reason: pending[0].Reason})

	var messages []rpc.Encoded
	for _, f := range pending[:min(len(pending), tellMost)] {
		message, err := proto.Marshal(&torchftpb.LighthouseMessage{Message: &torchftpb.LighthouseMessage_MemberFailed{
			MemberFailed: &torchftpb.MemberFailed{QuorumId: f.QuorumID, ReplicaId: f.ReplicaID, Reason: f.Reason},
		}})
		if err == nil { // else a name that is no UTF-8, which no stream and no call lets in
			messages = append(messages, message)
		}
	}
	for one := range j.streams.open {
		one.post(outgoing{news: messages})
	}
}
