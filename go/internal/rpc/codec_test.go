package rpc

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/torchft/torchft/go/torchftpb"
)

func TestEncodedIsSentAsItIs(t *testing.T) {
	want := &torchftpb.LighthouseHeartbeatRequest{ReplicaId: "a"}
	raw, err := proto.Marshal(want)
	require.NoError(t, err)
	c := newCodec()
	for range 3 { // one for each waiter
		sent, err := c.Marshal(Encoded(raw))
		require.NoError(t, err)
		require.Len(t, sent, 1)
		assert.Same(t, &raw[0], &sent[0].ReadOnlyData()[0], "the bytes are not copied")
		var got torchftpb.LighthouseHeartbeatRequest
		require.NoError(t, c.Unmarshal(sent, &got))
		sent.Free()
		assert.True(t, proto.Equal(want, &got))
	}
	sent, err := c.Marshal(want)
	require.NoError(t, err)
	assert.Equal(t, raw, sent.Materialize())
}
