package rpc

import (
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
)

// Encoded is a message that is encoded already. A quorum is encoded once and answers every waiter with the
// same bytes: encoding it for each of n waiters would be O(n²) work and memory in each step.
type Encoded []byte

// codec is gRPC's protobuf codec that also sends Encoded as it is.
type codec struct{ encoding.CodecV2 }

func newCodec() encoding.CodecV2 { return codec{encoding.GetCodecV2(proto.Name)} }

func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	if encoded, ok := v.(Encoded); ok {
		return mem.BufferSlice{mem.SliceBuffer(encoded)}, nil
	}
	return c.CodecV2.Marshal(v)
}
