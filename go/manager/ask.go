package manager

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/tracing"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/round"
)

// replyMargin is the longest time by which a request to the lighthouse ends before the ranks' deadline, so
// that its error still reaches the ranks.
const replyMargin = 100 * time.Millisecond

// ask starts the request of a round to the lighthouse. The caller holds mu.
func (s *Server) ask(a round.AskLighthouse) {
	// The request ends before the ranks' own deadlines: after these the ranks would not receive the reason.
	ctx, cancel := context.WithDeadline(s.ctx, rpc.Sooner(a.Deadline, replyMargin))
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
		s.mu.Lock()
		defer s.mu.Unlock()
		cancel()
		delete(s.asking, a.Round)
		s.trouble = ""
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
		return wire.ToStatus(round.Failure{Kind: round.KindTimeout, Reason: s.unreachable(start, err)})
	}
	refused := int64(0)
	var before error // why the previous request did not reach the lighthouse, nil if it did
	for failed := 1; ; failed++ {
		q, err := s.membership.Quorum(ctx, a.Member, a.KnownQuorumID)
		if err != nil && ctx.Err() != nil && before != nil {
			return nil, unreached(before) // its reason is more specific than "deadline exceeded"
		}
		if err == nil || ctx.Err() != nil {
			return q, err
		}
		before = nil
		away := false
		switch retryAfter(err, refused, s.cfg.QuorumRetries) {
		case noRetry:
			return nil, err
		case ifRefused:
			refused++
		case untilAnswer:
			away, before = true, err
		}
		s.setTrouble(away, start, err, failed)
		wait := rpc.RetryBackoff.Wait(failed, rand.Float64())
		if away && time.Now().Add(wait).After(last) {
			return nil, unreached(err)
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(wait):
		}
	}
}

func (s *Server) unreachable(since time.Time, err error) string {
	return fmt.Sprintf("the lighthouse at %s could not be reached, tried for %s: %s",
		s.cfg.LighthouseAddr, time.Since(since).Round(time.Millisecond), rpc.Message(err))
}

// setTrouble records why the lighthouse is not reached, as long as the outage lasts. If a rank's deadline
// passes meanwhile, its error contains this reason.
func (s *Server) setTrouble(away bool, since time.Time, err error, failed int) {
	if failed == 1 && !away { // attend logs an outage
		s.log.Warn("torchft: asking the lighthouse again", "error", rpc.Message(err))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.trouble = ""
	if away {
		s.trouble = s.unreachable(since, err)
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
