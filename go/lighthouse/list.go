package lighthouse

import (
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/rpc"
)

// refuseList returns the error for a member that knows several lighthouses, if this one is in no cluster: each of them would form
// quorums of its own, and the job would have several histories.
func (s *Server) refuseList(lighthouses uint32) error {
	if lighthouses <= 1 || len(s.cfg.Cluster) > 0 {
		return nil
	}
	list := "URL" + strings.Repeat(",URL", int(min(lighthouses, rpc.MaxLighthouses))-1)
	return status.Errorf(codes.FailedPrecondition, "TORCHFT_LIGHTHOUSE names %d lighthouses, and this one, %s, is in no cluster: "+
		"start each of them with --cluster %s, or name one lighthouse", lighthouses, s.address, list)
}
