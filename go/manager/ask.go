package manager

import (
	"context"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/tracing"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/round"
)

// ask starts the request of a round to the lighthouse. The caller holds mu.
func (s *Server) ask(a round.AskLighthouse) {
	ctx, cancel := context.WithDeadline(s.ctx, a.Deadline)
	s.asking[a.Round] = cancel
	s.heals = groupHeal{} // all heals of the last quorum have ended, successful or not
	span := s.tracedAsk(a)
	ctx = tracing.Below(ctx, span.Parent())
	rpc.Go(&s.tasks, s.log, "quorum round", func() {
		q, err := s.askUntilAnswered(ctx, a)
		span.End(err)
		known := round.QuorumKnown{Round: a.Round, Quorum: q}
		if err != nil {
			failure := wire.FromError(err)
			known.Failure = &failure
		}
		if err == nil { // before the ranks can report of this round
			s.suspected.Store(nil)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		cancel()
		delete(s.asking, a.Round)
		s.step(known)
	})
}

// askUntilAnswered repeats the request until it is answered, retryAfter decides against another one, or the
// deadline is near.
func (s *Server) askUntilAnswered(ctx context.Context, a round.AskLighthouse) (q *quorum.Quorum, err error) {
	defer rpc.Recovered(s.log, "the quorum round", &err)
	start := time.Now()
	last, _ := ctx.Deadline()
	unreached := func(err error) error {
		return status.Errorf(codes.DeadlineExceeded,
			"the lighthouse at %s could not be reached, tried for %s: %s", s.cfg.LighthouseAddr,
			time.Since(start).Round(time.Millisecond), rpc.Message(err))
	}
	refused := int64(0)
	var away error // why the last request did not reach the lighthouse, nil if it did
	for failed := 1; ; failed++ {
		q, err := s.membership.Quorum(ctx, a.Member, a.KnownQuorumID)
		if err != nil && ctx.Err() != nil && away != nil {
			return nil, unreached(away) // its reason is more specific than "deadline exceeded"
		}
		if err == nil || ctx.Err() != nil {
			return q, err
		}
		away = nil
		switch retryAfter(err, refused, s.cfg.QuorumRetries) {
		case noRetry:
			return nil, err
		case ifRefused:
			refused++
		case untilAnswer:
			away = err
		}
		if failed == 1 && away == nil { // attend logs an outage
			s.log.Warn("torchft: asking the lighthouse again", "error", rpc.Message(err))
		}
		wait := rpc.RetryBackoff.Wait(failed, rand.Float64())
		if away != nil && time.Now().Add(wait).After(last) {
			return nil, unreached(err)
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(wait):
		}
	}
}

// attend sends heartbeats while the server runs. Begin and end of an outage are logged once each.
func (s *Server) attend() {
	failed := 0
	reached := func() {
		if failed > 0 {
			s.log.Warn("torchft: heartbeats reach the lighthouse again") // as visible as the begin
		}
		failed = 0
		s.lighthouseReached()
	}
	for {
		err := s.attendUntilFailure(reached)
		if s.ctx.Err() != nil {
			return
		}
		if failed++; failed == 1 {
			s.log.Warn("torchft: heartbeats do not reach the lighthouse", "error", rpc.Message(err))
		}
		rpc.Pause(s.ctx, failed)
	}
}

func (s *Server) attendUntilFailure(reached func()) (err error) {
	defer rpc.Recovered(s.log, "heartbeats", &err)
	return s.membership.Attend(s.ctx, s.cfg.HeartbeatInterval, reached, s.doing)
}
