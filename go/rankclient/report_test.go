package rankclient

import (
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"google.golang.org/grpc"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/torchftpb"
)

// recorder is a stream that records what is sent.
type recorder struct {
	grpc.BidiStreamingClient[torchftpb.RankRequest, torchftpb.RankResponse]
	sent chan *torchftpb.RankRequest
}

func (r recorder) Send(req *torchftpb.RankRequest) error {
	r.sent <- req
	return nil
}

// A call holds the lock of opening while it looks whether a stream is open. A report of another thread at
// that moment must be sent.
func TestAReportIsSentWhileACallLooksForTheStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sent := make(chan *torchftpb.RankRequest, 1)
		s := newSession(nil)
		defer s.cancel()
		s.stream.Store(rpc.NewStream[torchftpb.RankRequest, torchftpb.RankResponse,
			*torchftpb.RankResponse](recorder{sent: sent}, func() {}))
		s.opening <- struct{}{}
		s.Report(&torchftpb.RankRequest{
			Request: &torchftpb.RankRequest_Counted{Counted: &torchftpb.Counted{Number: 1}},
		})
		synctest.Wait()
		if assert.Len(t, sent, 1) {
			assert.EqualValues(t, 1, (<-sent).GetCounted().GetNumber())
		}
	})
}
