package rpc_test

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"google.golang.org/grpc/encoding"
	grpcproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// What is read from others must be refused or understood, and never end the process. `go test` runs the seeds;
// `go test ./internal/rpc -fuzz FuzzListChange` goes on from there.

// FuzzListChange reads the packed parts of a list, and the quorum that refers to it.
func FuzzListChange(f *testing.F) {
	var members []quorum.Member
	for _, id := range []string{"a", "b", "c"} {
		members = append(members, quorum.Member{ReplicaID: id, Address: "http://" + id, Data: string(bytes.Repeat([]byte(id), 1000))})
	}
	q := &quorum.Quorum{ID: 7, Members: members, Revision: quorum.RevisionOf(members)}
	states, err := proto.Marshal(rpc.StatesToProto(q))
	require.NoError(f, err)
	for _, part := range rpc.ChangeToProto(q.Since(0, nil)) {
		for _, pack := range []func(*torchftpb.ListChange) (*torchftpb.ListChange, error){
			rpc.Pack, func(p *torchftpb.ListChange) (*torchftpb.ListChange, error) { return p, nil },
		} {
			packed, err := pack(part)
			require.NoError(f, err)
			encoded, err := proto.Marshal(packed)
			require.NoError(f, err)
			f.Add(encoded, states)
			f.Add(encoded[:len(encoded)/2], states[:len(states)/2])
		}
	}
	f.Fuzz(func(t *testing.T, encoded, states []byte) {
		var part torchftpb.ListChange
		if proto.Unmarshal(encoded, &part) != nil {
			return
		}
		var change quorum.Change
		if rpc.AddPart(&change, &part) != nil {
			return
		}
		list, err := change.Apply(members)
		if err != nil {
			return
		}
		var said torchftpb.QuorumStates
		if proto.Unmarshal(states, &said) != nil {
			return
		}
		if q, err := rpc.QuorumFromStates(&said, list); err == nil {
			require.Len(t, q.Members, len(list))
			_, err := proto.Marshal(rpc.QuorumToProto(q))
			_ = err // a name may be no UTF-8; then there is an error, and no panic
		}
	})
}

// FuzzMessages decodes every message that comes from others, and uses what came out as the servers do.
func FuzzMessages(f *testing.F) {
	member := &torchftpb.QuorumMember{ReplicaId: "a", Address: "http://a:1", ReconfigureHandles: []string{"h"}, Step: -1}
	for _, m := range []proto.Message{
		&torchftpb.LighthouseQuorumRequest{Requester: member, KnownQuorumId: 1 << 62},
		&torchftpb.ManagerQuorumRequest{GroupRank: -1, CheckpointMetadata: "x"},
		&torchftpb.MemberMessage{Message: &torchftpb.MemberMessage_Ask{Ask: &torchftpb.Ask{Member: member, TimeoutUs: -1}}},
		&torchftpb.RankRequest{Call: 1, Request: &torchftpb.RankRequest_GiveUp{GiveUp: true}},
		&torchftpb.Quorum{Participants: []*torchftpb.QuorumMember{member}},
	} {
		encoded, err := proto.Marshal(m)
		require.NoError(f, err)
		f.Add(encoded)
	}
	codec := encoding.GetCodecV2(grpcproto.Name)
	f.Fuzz(func(t *testing.T, encoded []byte) {
		for _, m := range []proto.Message{
			&torchftpb.LighthouseQuorumRequest{}, &torchftpb.LighthouseHeartbeatRequest{}, &torchftpb.ManagerQuorumRequest{},
			&torchftpb.ShouldCommitRequest{}, &torchftpb.CheckpointMetadataRequest{}, &torchftpb.KillRequest{},
			&torchftpb.MemberMessage{}, &torchftpb.LighthouseMessage{}, &torchftpb.RankRequest{}, &torchftpb.RankResponse{},
			&torchftpb.LighthouseQuorumResponse{}, &torchftpb.ManagerQuorumResponse{},
		} {
			if codec.Unmarshal(mem.BufferSlice{mem.SliceBuffer(encoded)}, m) != nil {
				continue
			}
			switch m := m.(type) {
			case *torchftpb.LighthouseQuorumRequest:
				back := rpc.MemberToProto(rpc.MemberFromProto(m.GetRequester()))
				if m.GetRequester() != nil {
					require.True(t, proto.Equal(m.GetRequester(), back), "nothing that a member says gets lost")
				}
			case *torchftpb.LighthouseQuorumResponse:
				_ = rpc.QuorumFromProto(m.GetQuorum())
			case *torchftpb.MemberMessage:
				if past := m.GetPast(); past != nil {
					_ = rpc.PastFromProto(past).Validate()
				}
			}
		}
	})
}

// FuzzPort sends anything to the one port of gRPC and HTTP.
func FuzzPort(f *testing.F) {
	var frames bytes.Buffer
	frames.WriteString(http2.ClientPreface)
	framer := http2.NewFramer(&frames, nil)
	require.NoError(f, framer.WriteSettings())
	f.Add(frames.Bytes())
	require.NoError(f, framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: []byte{0x82, 0x87}, EndHeaders: true}))
	f.Add(frames.Bytes())
	f.Add([]byte("GET /status HTTP/1.1\r\nHost: x\r\n\r\n"))
	f.Add([]byte("POST /replica/%zz/kill HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n"))
	f.Add([]byte("PRI * HTTP/2.0\r\n\r\nXX"))
	f.Add([]byte{0x16, 3, 1, 0, 200, 1, 0, 0, 196, 3, 3})
	f.Add([]byte{})

	network, log := fttest.NewNetwork(), &fttest.Log{}
	lis, err := network.Host("server").Listen(":1")
	require.NoError(f, err)
	logger := slog.New(slog.NewTextHandler(log, nil))
	gate, err := rpc.NewGate(rpc.Security{TokenFile: fttest.File(f, "secret")}, rpc.Limits{}, logger)
	require.NoError(f, err)
	g := rpc.NewGRPC(gate, logger)
	torchftpb.RegisterLighthouseServiceServer(g, heartbeats{})
	server := rpc.Serve(lis, gate, g, http.NotFoundHandler(), logger)
	f.Cleanup(server.Stop)
	f.Fuzz(func(t *testing.T, sent []byte) {
		conn, err := network.Host("x").Dial(context.Background(), "server:1")
		require.NoError(t, err)
		_, err = conn.Write(sent)
		require.NoError(t, err)
		// What is not whole ends here. Without it the server would wait for the rest, and each input would take the deadline.
		require.NoError(t, conn.(interface{ CloseWrite() error }).CloseWrite())
		_ = conn.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		_, _ = io.Copy(io.Discard, conn)
		require.NoError(t, conn.Close())
		logged := log.Drain()
		require.NotContains(t, logged, "panic")
		require.NotContains(t, logged, "level=ERROR")
	})
}

func FuzzAddress(f *testing.F) {
	for _, address := range []string{"http://a:1", "https://[::1]:65535/", "a:1", "http://", "http://u@a:1", "http://a:1?x", "http://a:99999", "://", "http://[::1", "\x00"} {
		f.Add(address)
	}
	f.Fuzz(func(t *testing.T, address string) {
		if a, err := rpc.ParseAddress("x", address); err == nil {
			require.NotEmpty(t, a.HostPort)
		}
		_ = rpc.ValidateBind("x", address)
		_ = rpc.ValidateHostname("x", address)
		_ = rpc.IsLoopback(address)
		_ = rpc.IsOwnHost(address, "a")
		if tokens, err := rpc.ParseTokens([]byte(address)); err == nil {
			require.NotEmpty(t, tokens)
			require.Equal(t, rpc.TokenOK, tokens.Check([]string{rpc.Bearer(tokens[0])}))
		}
	})
}
