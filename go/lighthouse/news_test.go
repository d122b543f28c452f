package lighthouse_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/lighthouse"
	"github.com/torchft/torchft/go/torchftpb"
)

// If thousands of simultaneous failures were each reported to thousands of members in separate messages, that
// would take minutes of the lighthouse's time.
func TestManyFailuresAreReportedInFewMessages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ended = 100
		c := fttest.NewCluster(t, ended+1)
		survivor := attend(t, c, "survivor")
		all := []*rawStream{survivor}
		for i := range ended {
			all = append(all, attend(t, c, fmt.Sprintf("ended-%03d", i)))
		}
		for _, w := range all {
			w.ask(1, time.Minute)
		}
		for _, w := range all {
			w.answered()
		}
		for _, w := range all[1:] {
			w.hangUp()
		}
		time.Sleep(time.Second)
		synctest.Wait()
		lines := c.Log.Count("a member failed")
		assert.Positive(t, lines)
		assert.LessOrEqual(t, lines, 2, "%s", c.Log)

		survivor.ask(2, time.Second)
		reports := 0
		for {
			m := survivor.receive()
			if m.GetFailure() != nil {
				break
			}
			assert.Equal(t, torchftpb.Notice_MEMBER_FAILED, m.GetNotice().GetKind())
			reports++
		}
		assert.Positive(t, reports)
		assert.LessOrEqual(t, reports, 64)
	})
}

// When the network of the collectives fails, thousands of members stall at the same moment.
func TestManyStalledMembersAreReportedInFewMessages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const stalled = 100
		c := fttest.NewCluster(t, stalled+1, func(cfg *lighthouse.Config) { cfg.StalledAfter = time.Second })
		waiting := attend(t, c, "waiting")
		all := []*rawStream{waiting}
		for i := range stalled {
			all = append(all, attend(t, c, fmt.Sprintf("stalled-%03d", i)))
		}
		for _, w := range all {
			w.ask(1, time.Minute)
		}
		for _, w := range all {
			w.answered()
		}
		waiting.ask(2, 3*time.Second)
		reports := 0
		for {
			m := waiting.receive()
			if m.GetFailure() != nil {
				break
			}
			assert.Equal(t, torchftpb.Notice_STALLED, m.GetNotice().GetKind())
			reports++
		}
		assert.Positive(t, reports)
		assert.LessOrEqual(t, reports, 32)
		assert.Equal(t, 1, c.Log.Count("a member makes no progress"), "%s", c.Log)
		assert.Equal(t, 1, c.Log.Count("and 92 more"), "%s", c.Log)
	})
}
