package wire

import (
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/torchftpb"
)

// NotLeader returns the error with which a lighthouse of a cluster that does not lead answers a member's
// stream. leader is the address of the lighthouse that leads, empty if none is known.
func NotLeader(leader, why string) error {
	s := status.New(codes.Unavailable, why)
	if detailed, err := s.WithDetails(&torchftpb.NotLeader{Leader: leader}); err == nil {
		// it fails only for an address that is no UTF-8
		s = detailed
	}
	return s.Err()
}

// LeaderOf is the inverse of NotLeader: the address of the leader, empty for all other errors.
func LeaderOf(err error) string {
	for _, detail := range status.Convert(err).Details() {
		if d, ok := detail.(*torchftpb.NotLeader); ok {
			return d.GetLeader()
		}
	}
	return ""
}
