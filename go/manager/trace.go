package manager

import (
	"go.opentelemetry.io/otel/attribute"

	"github.com/torchft/torchft/go/internal/tracing"
	"github.com/torchft/torchft/go/round"
)

// traced begins the span of a rank's call; it is nil unless the rank traces. The span of the group's request
// to the lighthouse is a child of the span of the rank that asked last.
func (s *Server) traced(c *rankCall) *tracing.Span {
	if c.traceparent == "" {
		return nil
	}
	attributes := []attribute.KeyValue{
		attribute.String("torchft.replica_id", s.cfg.ReplicaID),
		attribute.Int64("torchft.group_rank", c.GroupRank),
	}
	name := "manager.quorum"
	if c.kind == voteCall {
		name = "manager.should_commit"
		attributes = append(attributes, attribute.Bool("torchft.vote", c.vote))
	}
	return tracing.Continue(c.traceparent, name, c.Step, attributes...)
}

// tracedAsk begins the span of a group's request to the lighthouse. The caller holds mu.
func (s *Server) tracedAsk(a round.AskLighthouse) *tracing.Span {
	parent := s.parent
	s.parent = ""
	return tracing.Continue(parent, "manager.ask_lighthouse", a.Member.Step,
		attribute.String("torchft.replica_id", s.cfg.ReplicaID))
}
