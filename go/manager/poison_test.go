package manager_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// The same exception ends two groups: the second one and all others learn that the job stops, and requests are
// refused.
func TestTheSecondOfTwoEqualExceptionsStopsTheJob(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a, b, other := c.StartGroup("a", 1), c.StartGroup("b", 1), c.StartGroup("c", 1)
		round(t, 0, a, b, other)
		raised := func(g *fttest.Group) {
			g.Ranks[0].Report(&torchftpb.RankRequest{Request: &torchftpb.RankRequest_Raised{
				Raised: &torchftpb.Raised{Type: "ValueError", Place: "train.py:7 in loss", Step: 0,
					Text: "Traceback (most recent call last):"}}})
		}
		next := func(g *fttest.Group) *torchftpb.Notice {
			for {
				n := <-g.Ranks[0].Notices()
				if n.GetKind() == torchftpb.Notice_JUDGED || n.GetKind() == torchftpb.Notice_STOPPED {
					return n
				}
			}
		}
		raised(a)
		answer := next(a)
		assert.Equal(t, torchftpb.Notice_JUDGED, answer.GetKind())
		assert.Empty(t, answer.GetReason())
		raised(b)
		const verdict = "the job stops: the same exception has ended a and b: ValueError at train.py:7 in " +
			"loss in step 0\nTraceback (most recent call last):"
		assert.Equal(t, verdict, next(b).GetReason())
		news := next(other)
		assert.Equal(t, torchftpb.Notice_STOPPED, news.GetKind())
		assert.Equal(t, verdict, news.GetReason())
		assert.Equal(t, verdict, c.Lighthouse.Status().Stopped)

		refused := <-other.Quorum(0, 1, time.Minute)
		assert.Contains(t, refused.Err.Error(), "ValueError at train.py:7")
		late := <-c.StartGroup("d", 1).Quorum(0, 0, time.Minute)
		assert.Contains(t, late.Err.Error(), "the job stops: ")
		assert.Equal(t, quorum.Poisoned, wire.RefusalOf(late.Err))

		events := history(t, c)
		require.NotEmpty(t, events)
		kinds := map[any]int{}
		for _, e := range events {
			kinds[e["kind"]]++
		}
		assert.Equal(t, 1, kinds["stopped"])
		assert.Equal(t, 1, c.Log.Count("THE JOB STOPS"))
	})
}
