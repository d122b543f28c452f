package main

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/torchft/torchft/go/torchftpb"
)

// upstream is a group that makes a call for each quorum and each heartbeat, as the upstream manager does.
type upstream struct {
	conn    *grpc.ClientConn
	request *torchftpb.LighthouseQuorumRequest
	steps   chan *raw
	answer  raw
}

func newUpstream(ctx context.Context, lighthouse string, member *torchftpb.QuorumMember) (group, error) {
	conn, err := dial(ctx, lighthouse)
	if err != nil {
		return nil, err
	}
	return &upstream{conn: conn, request: &torchftpb.LighthouseQuorumRequest{Requester: member}, steps: make(chan *raw, 1), answer: raw{drop: true}}, nil
}

func (s *upstream) begin(step int64) error {
	s.request.Requester.Step = step
	bytes, err := proto.Marshal(s.request)
	s.steps <- &raw{bytes: bytes}
	return err
}

func (s *upstream) wait() (int, error) {
	request := <-s.steps
	ctx, cancel := context.WithTimeout(context.Background(), requestTimeout)
	defer cancel()
	err := s.conn.Invoke(ctx, torchftpb.LighthouseService_Quorum_FullMethodName, request, &s.answer)
	return s.answer.size, err
}

func (s *upstream) keep() { s.answer.drop = false }

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

func (s *upstream) alive(ctx context.Context) (time.Duration, error) {
	_, err := torchftpb.NewLighthouseServiceClient(s.conn).
		Heartbeat(ctx, &torchftpb.LighthouseHeartbeatRequest{ReplicaId: s.request.GetRequester().GetReplicaId()})
	return heartbeatInterval, err
}

func (s *upstream) close() { _ = s.conn.Close() }
