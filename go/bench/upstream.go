package main

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	codec "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/torchftpb"
)

// upstream is a group that makes a call for each quorum, as the upstream manager does.
type upstream struct {
	conn    *grpc.ClientConn
	request *torchftpb.LighthouseQuorumRequest
	begun   chan struct{}
	answer  encoded
}

// encoded is an answer that the benchmark does not decode. One process stands for all groups: if it decoded a
// thousand members for each of a thousand groups, it would use more processor time than the lighthouse. Real
// groups have their own processors.
type encoded struct {
	keep  bool // its bytes, too
	size  int
	bytes []byte
}

// leaveEncoded is gRPC's protobuf codec that receives encoded answers.
type leaveEncoded struct{ encoding.CodecV2 }

func (leaveEncoded) Unmarshal(data mem.BufferSlice, v any) error {
	answer := v.(*encoded)
	if answer.size = data.Len(); answer.keep {
		answer.bytes = data.Materialize()
	}
	return nil
}

func newUpstream(ctx context.Context, lighthouse string, member *torchftpb.QuorumMember) (group, error) {
	conn, err := rpc.Dial(ctx, rpc.Dialing{}, "lighthouse", lighthouse, requestTimeout)
	if err != nil {
		return nil, err
	}
	return &upstream{conn: conn, request: &torchftpb.LighthouseQuorumRequest{Requester: member},
		begun: make(chan struct{}, 1)}, nil
}

func (s *upstream) begin(step int64) error {
	s.request.Requester.Step = step
	s.begun <- struct{}{}
	return nil
}

func (s *upstream) wait() (int, error) {
	<-s.begun
	ctx, cancel := context.WithTimeout(context.Background(), requestTimeout)
	defer cancel()
	err := s.conn.Invoke(ctx, torchftpb.LighthouseService_Quorum_FullMethodName, s.request, &s.answer,
		grpc.ForceCodecV2(leaveEncoded{encoding.GetCodecV2(codec.Name)}))
	return s.answer.size, err
}

func (s *upstream) keep() { s.answer.keep = true }

func (s *upstream) check() (members int, steps int64) {
	var answer torchftpb.LighthouseQuorumResponse
	if err := proto.Unmarshal(s.answer.bytes, &answer); err != nil {
		return 0, 0
	}
	for _, m := range answer.GetQuorum().GetParticipants() {
		steps += m.GetStep()
	}
	return len(answer.GetQuorum().GetParticipants()), steps
}

func (s *upstream) close() { _ = s.conn.Close() }
