package main

import (
	"context"
	"errors"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
)

// raw is a message that the benchmark leaves encoded. One process stands for all groups: if it decoded a thousand members for each
// of a thousand groups, it would use more processor time than the lighthouse. Real groups have their own processors.
type raw struct {
	bytes []byte
	drop  bool // keep only the size of received messages
	size  int
}

// rawCodec is gRPC's protobuf codec, extended to raw messages.
type rawCodec struct{ encoding.CodecV2 }

func (c rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	if r, ok := v.(*raw); ok {
		return mem.BufferSlice{mem.SliceBuffer(r.bytes)}, nil
	}
	return c.CodecV2.Marshal(v)
}

func (c rawCodec) Unmarshal(data mem.BufferSlice, v any) error {
	r, ok := v.(*raw)
	if !ok {
		return c.CodecV2.Unmarshal(data, v)
	}
	r.size, r.bytes = data.Len(), nil
	if r.drop {
		return nil
	}
	r.bytes = data.MaterializeToBuffer(mem.NopBufferPool{}).ReadOnlyData()
	return nil
}

// dial opens a new connection to the lighthouse, and waits until it is ready.
func dial(ctx context.Context, lighthouse string, more ...grpc.DialOption) (*grpc.ClientConn, error) {
	const window = 4 << 20
	options := append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(rawCodec{encoding.GetCodecV2(proto.Name)}), grpc.MaxCallRecvMsgSize(256<<20)),
		grpc.WithStaticStreamWindowSize(window), grpc.WithStaticConnWindowSize(window),
		grpc.WithIdleTimeout(0),
	}, more...)
	conn, err := grpc.NewClient("passthrough:///"+strings.TrimPrefix(lighthouse, "http://"), options...)
	if err != nil {
		return nil, err
	}
	conn.Connect()
	for state := conn.GetState(); state != connectivity.Ready; state = conn.GetState() {
		if !conn.WaitForStateChange(ctx, state) {
			_ = conn.Close()
			return nil, errors.New("could not connect to " + lighthouse)
		}
	}
	return conn, nil
}

// heartbeatInterval is the interval between heartbeats of upstream managers.
const heartbeatInterval = 100 * time.Millisecond
