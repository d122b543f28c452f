package manager

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/tracing"
	"github.com/torchft/torchft/go/recovery"
	"github.com/torchft/torchft/go/round"
)

// rankCall is a request of a rank. It arrives by one of three paths: a unary call (service.go), a stream
// (session.go), or a call within this process (direct.go).
type rankCall struct {
	kind          callKind
	round.Request             // for a vote: only rank and step; for a request for metadata: only the rank
	vote          bool        // for a vote: its value
	traceparent   string      // of the rank's span; empty if it is not traced
	conn          *connection // if it breaks, the rank counts as disconnected; nil if the rank has none
}

type callKind int

const (
	quorumCall callKind = iota
	voteCall
	metadataCall
)

// answer is the result of a call.
type answer struct {
	result   *recovery.Result
	commit   bool
	stands   bool // with commit: the rank may begin the next step, without a quorum
	metadata string
	err      error
}

// replyMargin is the longest time by which a call is answered before its deadline, so that the answer still
// reaches the rank: an error names what the call waited for.
const replyMargin = 100 * time.Millisecond

// do makes a call, and returns its answer: shortly before the deadline of ctx at the latest, or when ctx is
// done.
func (s *Server) do(ctx context.Context, c rankCall) (a answer) {
	last := time.Now().Add(rpc.MaxWait)
	deadline, bounded := ctx.Deadline()
	if bounded {
		last = rpc.Sooner(deadline, replyMargin)
	}
	known := last // until when the lighthouse may take to answer
	if c.kind == quorumCall {
		if !bounded {
			return answer{err: status.Error(codes.InvalidArgument,
				"the quorum call has no deadline (grpc-timeout): it must have one")}
		}
		last = last.Add(deadline.Sub(last) / 2) // its error is more specific than that of the call's end
	}
	span := s.traced(&c)
	defer func() {
		if c.kind == voteCall && a.err == nil {
			span.Set(attribute.Bool("torchft.committed", a.commit))
		}
		span.End(a.err)
	}()
	id, answered := s.begin(&c, known, span)
	expired := time.NewTimer(time.Until(last))
	defer expired.Stop()
	cause := context.DeadlineExceeded
	select {
	case a := <-answered:
		return a
	case <-expired.C:
	case <-ctx.Done():
		cause = ctx.Err()
	}
	select {
	case a := <-answered: // before the end of the call
		return a
	default:
	}
	s.withdraw(id, cause)
	if a = <-answered; a.err != nil && errors.Is(cause, context.Canceled) {
		a.err = status.FromContextError(cause).Err() // the same error as over a network
	}
	return a
}

// begin feeds a call to the machine. known is until when the lighthouse may take to answer it.
func (s *Server) begin(c *rankCall, known time.Time, span *tracing.Span) (round.WaiterID, <-chan answer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.conn != nil && s.has(c.GroupRank) {
		s.presence.seen(c.conn, c.GroupRank)
	}
	if c.kind == quorumCall && span != nil {
		s.parent = span.Parent()
	}
	id, answered := s.waiters.Add()
	switch c.kind {
	case quorumCall:
		s.step(round.QuorumAsked{Request: c.Request, Waiter: id, Deadline: known})
	case voteCall:
		s.step(round.Voted{Waiter: id, GroupRank: c.GroupRank, Step: c.Step, ShouldCommit: c.vote})
	case metadataCall:
		s.step(round.MetadataAsked{Waiter: id, GroupRank: c.GroupRank})
	}
	return id, answered
}

// withdraw answers a call that has no answer yet, with the machine's description of what it waits for.
func (s *Server) withdraw(id round.WaiterID, cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.step(round.Withdrawn{Waiter: id, Timeout: errors.Is(cause, context.DeadlineExceeded)})
	s.waiters.Answer(id, answer{err: status.FromContextError(cause).Err()})
}
