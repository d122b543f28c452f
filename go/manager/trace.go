package manager

import (
	"go.opentelemetry.io/otel/attribute"

	"github.com/torchft/torchft/go/internal/tracing"
	"github.com/torchft/torchft/go/round"
)

// traced begins the span of a rank's wait for a quorum, nil unless the rank traces. The group's request to the lighthouse
// goes on below that of the rank that came last.
func (s *Server) traced(parent string, req Request) *tracing.Span {
	if parent == "" {
		return nil
	}
	span := tracing.Continue(parent, "manager.quorum", req.Step,
		attribute.String("torchft.replica_id", s.cfg.ReplicaID), attribute.Int64("torchft.group_rank", req.GroupRank))
	if span != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.parent = span.Parent()
	}
	return span
}

// tracedVote begins the span of a rank's vote and its wait for those of the others, nil unless the rank traces.
func (s *Server) tracedVote(parent string, groupRank, step int64, vote bool) *tracing.Span {
	if parent == "" {
		return nil
	}
	return tracing.Continue(parent, "manager.should_commit", step, attribute.String("torchft.replica_id", s.cfg.ReplicaID),
		attribute.Int64("torchft.group_rank", groupRank), attribute.Bool("torchft.vote", vote))
}

// tracedAsk begins the span of a group's request to the lighthouse. The caller holds mu.
func (s *Server) tracedAsk(a round.AskLighthouse) *tracing.Span {
	parent := s.parent
	s.parent = ""
	if parent == "" {
		return nil
	}
	return tracing.Continue(parent, "manager.ask_lighthouse", a.Member.Step, attribute.String("torchft.replica_id", s.cfg.ReplicaID))
}
