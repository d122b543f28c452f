package wire_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/encoding"
	grpcproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/torchftpb"
)

// Bytes from another process must be decoded, or refused with an error, without a panic. `go test` runs the
// seeds; `go test ./internal/wire -fuzz FuzzMessages` continues with mutations of them.

// FuzzMessages decodes the input as each kind of message that other processes send. Where lighthouses,
// managers and ranks convert the content, so does this.
func FuzzMessages(f *testing.F) {
	member := &torchftpb.QuorumMember{ReplicaId: "a", Address: "http://a:1",
		ReconfigureHandles: []string{"h"}, Step: -1}
	for _, m := range []proto.Message{
		&torchftpb.LighthouseQuorumRequest{Requester: member, KnownQuorumId: 1 << 62},
		&torchftpb.ManagerQuorumRequest{GroupRank: -1, CheckpointMetadata: "x"},
		&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Ask{Ask: &torchftpb.Ask{Member: member,
			TimeoutUs: -1}}},
		&torchftpb.RankRequest{Call: 1, Request: &torchftpb.RankRequest_Cancel{Cancel: true}},
		&torchftpb.Quorum{Participants: []*torchftpb.QuorumMember{member}},
		&torchftpb.RankRequest{
			Call: 1, TimeoutUs: -1 << 63,
			Request: &torchftpb.RankRequest_Quorum{Quorum: &torchftpb.ManagerQuorumRequest{GroupRank: -1}},
		},
		&torchftpb.RankResponse{
			Call:     1,
			Response: &torchftpb.RankResponse_Quorum{Quorum: &torchftpb.ManagerQuorumResponse{Heal: true}},
		},
		&torchftpb.Notice{QuorumId: -1, ReplicaId: "a"},
	} {
		encoded, err := proto.Marshal(m)
		require.NoError(f, err)
		f.Add(encoded)
	}
	codec := encoding.GetCodecV2(grpcproto.Name)
	f.Fuzz(func(t *testing.T, encoded []byte) {
		for _, m := range []proto.Message{
			&torchftpb.LighthouseQuorumRequest{}, &torchftpb.LighthouseHeartbeatRequest{},
			&torchftpb.ManagerQuorumRequest{},
			&torchftpb.ShouldCommitRequest{}, &torchftpb.CheckpointMetadataRequest{},
			&torchftpb.KillRequest{},
			&torchftpb.MemberMessage{}, &torchftpb.LighthouseMessage{}, &torchftpb.RankRequest{},
			&torchftpb.RankResponse{},
			&torchftpb.LighthouseQuorumResponse{}, &torchftpb.ManagerQuorumResponse{},
			&torchftpb.Notice{},
		} {
			if codec.Unmarshal(mem.BufferSlice{mem.SliceBuffer(encoded)}, m) != nil {
				continue
			}
			switch m := m.(type) {
			case *torchftpb.LighthouseQuorumRequest:
				back := wire.MemberToProto(wire.MemberFromProto(m.GetRequester()))
				if m.GetRequester() != nil {
					require.True(t, proto.Equal(m.GetRequester(), back),
						"a conversion to Member and back loses no field")
				}
			case *torchftpb.LighthouseQuorumResponse:
				_ = wire.QuorumFromProto(m.GetQuorum())
			case *torchftpb.RankRequest:
				_ = wire.RequestFromProto(m.GetQuorum())
			case *torchftpb.MemberMessage:
				if past := m.GetPast(); past != nil {
					if q, err := wire.Unpack(past); err == nil {
						_ = q.Past().Validate()
					}
				}
			}
		}
	})
}
