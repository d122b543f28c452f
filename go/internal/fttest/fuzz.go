package fttest

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// FuzzStream sends messages of any kind on streams of a method, and looks for internal errors in the server's
// log. A seed has the messages of one stream; in the corpus each message is preceded by its length.
func FuzzStream[M proto.Message](f *testing.F, conn *grpc.ClientConn, log *Log, method string, seeds [][]M) {
	for _, messages := range seeds {
		var all []byte
		for _, m := range messages {
			encoded, err := proto.Marshal(m)
			require.NoError(f, err)
			all = protowire.AppendBytes(all, encoded)
		}
		f.Add(all)
	}
	desc := &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}
	f.Fuzz(func(t *testing.T, all []byte) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		stream, err := conn.NewStream(ctx, desc, method, grpc.ForceCodec(bytesCodec{}))
		require.NoError(t, err)
		defer time.AfterFunc(20*time.Millisecond, cancel).Stop()
		for len(all) > 0 {
			message, n := protowire.ConsumeBytes(all)
			if n < 0 {
				message, n = all, len(all)
			}
			all = all[n:]
			if stream.SendMsg(&message) != nil {
				break
			}
		}
		_ = stream.CloseSend()
		for err == nil {
			var answer []byte
			err = stream.RecvMsg(&answer)
		}
		require.NotContains(t, log.Drain(), "internal error")
	})
}

// bytesCodec sends bytes unchanged.
type bytesCodec struct{}

func (bytesCodec) Marshal(v any) ([]byte, error)      { return *v.(*[]byte), nil }
func (bytesCodec) Unmarshal(data []byte, v any) error { *v.(*[]byte) = data; return nil }
func (bytesCodec) Name() string                       { return "proto" }
