package rpc

import (
	"log/slog"

	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
)

// Encoded is a message that has been encoded already. A quorum is encoded once, and the same bytes are sent
// to every waiter: encoding it for each of n waiters would take O(n²) time and memory in each step.
type Encoded []byte

// Numbered is a message whose first field is a number, and whose other fields are encoded already.
type Numbered struct {
	Number  uint64
	Message Encoded
}

// codec is gRPC's protobuf codec that also sends Encoded and Numbered unchanged, and receives Encoded.
type codec struct{ encoding.CodecV2 }

func newCodec() encoding.CodecV2 { return codec{encoding.GetCodecV2(proto.Name)} }

// Unmarshal recovers from panics of the decoder. The interceptors, which recover from all other panics, run
// only after gRPC has decoded the request.
func (c codec) Unmarshal(data mem.BufferSlice, v any) (err error) {
	defer Recovered(slog.Default(), "decoding", &err)
	if encoded, ok := v.(*Encoded); ok {
		*encoded = data.Materialize()
		return nil
	}
	return c.CodecV2.Unmarshal(data, v)
}

func (c codec) Marshal(v any) (data mem.BufferSlice, err error) {
	defer Recovered(slog.Default(), "encoding", &err)
	switch v := v.(type) {
	case Encoded:
		return mem.BufferSlice{mem.SliceBuffer(v)}, nil
	case Numbered:
		// Two encoded protobuf messages, one after the other, decode as one message with the fields of both.
		number := protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), v.Number)
		return mem.BufferSlice{mem.SliceBuffer(number), mem.SliceBuffer(v.Message)}, nil
	}
	return c.CodecV2.Marshal(v)
}
