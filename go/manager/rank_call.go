package manager

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/recovery"
	"github.com/torchft/torchft/go/round"
	"github.com/torchft/torchft/go/torchftpb"
)

// rankCall is a request of a rank. It arrives by one of three paths: a unary call (service.go), a stream
// (session.go), or a call within this process (direct.go).
type rankCall struct {
	kind          callKind
	round.Request        // for a vote: only rank and step; for a request for metadata: only the rank
	vote          bool   // for a vote: its value
	traceparent   string // of the rank's span; empty if it is not traced
	deadline      time.Time
	conn          *connection // if it breaks, the rank counts as disconnected; nil if the rank has none

	// The server's lock guards these.
	id       round.WaiterID
	answered bool
	expiry   *time.Timer
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

func quorumFromProto(req *torchftpb.ManagerQuorumRequest) rankCall {
	return rankCall{kind: quorumCall, Request: wire.RequestFromProto(req), traceparent: req.GetTraceparent()}
}

func voteFromProto(req *torchftpb.ShouldCommitRequest) rankCall {
	return rankCall{
		kind:    voteCall,
		Request: round.Request{GroupRank: req.GetGroupRank(), Step: req.GetStep()},
		vote:    req.GetShouldCommit(), traceparent: req.GetTraceparent(),
	}
}

// replyMargin is the longest time by which a call is answered before its deadline, so that the answer still
// reaches the rank: an error names what the call waited for.
const replyMargin = 100 * time.Millisecond

// do begins a call with the deadline of ctx, and returns its answer, or an error when ctx is done.
func (s *Server) do(ctx context.Context, c rankCall) answer {
	c.deadline, _ = ctx.Deadline()
	answered := make(chan answer, 1)
	s.begin(&c, func(a answer) { answered <- a })
	select {
	case a := <-answered:
		return a
	case <-ctx.Done():
	}
	s.abandon(&c, ctx.Err())
	a := <-answered
	if a.err != nil && errors.Is(ctx.Err(), context.Canceled) {
		a.err = status.FromContextError(ctx.Err()).Err() // the same error as over a network
	}
	return a
}

// begin feeds a call to the machine, and calls answered once, with the answer: shortly before the call's
// deadline at the latest, and possibly before begin returns. answered must not block: it is mostly called
// under the server's lock. A goroutine for each call of a stream, which waits for the answer, would take half
// as much time again in a group of many ranks.
func (s *Server) begin(c *rankCall, answered func(answer)) {
	last := time.Now().Add(rpc.MaxWait)
	if !c.deadline.IsZero() {
		last = rpc.Sooner(c.deadline, replyMargin)
	}
	known := last // until when the lighthouse may take to answer
	if c.kind == quorumCall {
		if c.deadline.IsZero() {
			answered(answer{err: status.Error(codes.InvalidArgument,
				"the quorum call has no deadline (grpc-timeout): it must have one")})
			return
		}
		// the lighthouse's error is more specific than that of the end of the call
		last = last.Add(c.deadline.Sub(last) / 2)
	}
	span := s.traced(c)

	s.mu.Lock()
	defer s.mu.Unlock()
	if c.conn != nil && s.has(c.GroupRank) {
		s.presence.seen(c.conn, c.GroupRank)
	}
	if c.kind == quorumCall && span != nil {
		s.parent = span.Parent()
	}
	c.id = s.waiters.AddFunc(func(a answer) {
		c.answered = true
		if c.expiry != nil {
			c.expiry.Stop()
		}
		if c.kind == voteCall && a.err == nil && span != nil {
			span.Set(attribute.Bool("torchft.committed", a.commit))
		}
		span.End(a.err)
		answered(a)
	})
	switch c.kind {
	case quorumCall:
		s.step(round.QuorumAsked{Request: c.Request, Waiter: c.id, Deadline: known})
	case voteCall:
		s.step(round.Voted{Waiter: c.id, GroupRank: c.GroupRank, Step: c.Step, ShouldCommit: c.vote})
	case metadataCall:
		s.step(round.MetadataAsked{Waiter: c.id, GroupRank: c.GroupRank})
	}
	if !c.answered {
		c.expiry = rpc.AfterFunc(s.log, "the deadline of a call",
			func() { s.abandon(c, context.DeadlineExceeded) })
		c.expiry.Reset(time.Until(last))
	}
}

// abandon answers a call that has no answer yet, with the machine's description of what it waits for.
func (s *Server) abandon(c *rankCall, cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.answered || c.id == 0 {
		return
	}
	s.step(round.Withdrawn{Waiter: c.id, Timeout: errors.Is(cause, context.DeadlineExceeded)})
	s.waiters.Answer(c.id, answer{err: status.FromContextError(cause).Err()})
}
