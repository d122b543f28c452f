package manager

import (
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/torchftpb"
)

// stuckTime is half of the longest time for which a rank that does not read may delay the answers to the others.
const stuckTime = 25 * time.Millisecond

// outbox has the sessions that have answers to send. One goroutine sends those of all ranks: the last vote answers all of them at
// once, and to wake a goroutine for each of thousands of streams would cost the server much. Send blocks if a rank does not read: then
// another goroutine takes over (stuckTime), and the stuck one serves only that rank. A goroutine ends when there is nothing to send.
type outbox struct {
	mu    sync.Mutex
	ready []*openSession
	turn  int // number of the goroutine that sends
	busy  bool
	taken int // number of sessions taken so far
}

// put queues a session. It does not block.
func (b *outbox) put(s *Server, o *openSession) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ready = append(b.ready, o)
	if !b.busy {
		b.busy = true
		b.start(s)
	}
}

// start starts the next goroutine that sends. The caller holds mu.
func (b *outbox) start(s *Server) {
	b.turn++
	turn, taken := b.turn, b.taken
	var watch *time.Timer
	watch = rpc.AfterFunc(s.log, "answers to ranks", func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		switch {
		case !b.busy || b.turn != turn: // it has ended
		case b.taken != taken:
			taken = b.taken
			watch.Reset(stuckTime)
		default:
			b.start(s)
		}
	})
	watch.Reset(stuckTime)
	rpc.Go(&s.tasks, s.log, "answers to ranks", func() {
		defer watch.Stop()
		var encoded encodedVote
		for o := b.take(turn); o != nil; o = b.take(turn) {
			o.send(&encoded)
		}
	})
}

// take returns the next session. It returns nil if there is none, or if another goroutine has taken over.
func (b *outbox) take(turn int) *openSession {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.turn != turn {
		return nil
	}
	if len(b.ready) == 0 {
		b.busy, b.ready = false, nil
		return nil
	}
	o := b.ready[0]
	b.ready = b.ready[1:]
	b.taken++
	return o
}

// encodedVote is the last answer to a vote, encoded. All ranks get the same answer, so it is encoded once.
type encodedVote struct {
	answer  answer
	message rpc.Encoded
}

func (e *encodedVote) encode(a answer) rpc.Encoded {
	if e.message == nil || e.answer != a {
		e.answer = a
		e.message, _ = proto.Marshal(&torchftpb.RankResponse{Response: &torchftpb.RankResponse_ShouldCommit{ // always valid
			ShouldCommit: &torchftpb.ShouldCommitResponse{ShouldCommit: a.commit, Stands: a.stands},
		}})
	}
	return e.message
}
