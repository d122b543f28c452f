package rankclient

import (
	"io"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	"github.com/torchft/torchft/go/torchftpb"
)

// lastWords is a stream that answers one call, and ends before the caller reads the answer.
type lastWords struct {
	grpc.BidiStreamingClient[torchftpb.RankRequest, torchftpb.RankResponse]
	asked chan uint64
	ended chan struct{}
}

func (w lastWords) Send(req *torchftpb.RankRequest) error {
	w.asked <- req.GetCall()
	<-w.ended
	return nil
}

func (w lastWords) Recv() (*torchftpb.RankResponse, error) {
	call, open := <-w.asked
	if !open {
		return nil, io.EOF
	}
	close(w.asked)
	return &torchftpb.RankResponse{Call: call, Response: &torchftpb.RankResponse_ShouldCommit{
		ShouldCommit: &torchftpb.ShouldCommitResponse{ShouldCommit: true},
	}}, nil
}

// A server that shuts down sends its last answers first. A decision to commit must reach its caller, although the end of the stream
// follows at once.
func TestAnAnswerCountsThatCameBeforeTheEnd(t *testing.T) {
	for range 50 {
		ended := make(chan struct{})
		s := &clientStream{
			wire: lastWords{asked: make(chan uint64, 1), ended: ended}, ended: ended,
			waiting: map[uint64]chan *torchftpb.RankResponse{},
		}
		go s.receive(func() {})
		resp, err := s.call(t.Context(), &torchftpb.RankRequest{})
		require.NoError(t, err)
		assert.True(t, resp.GetShouldCommit().GetShouldCommit())
	}
}
