package manager_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/testmain"
)

// Steps in which no member joins or fails log nothing. Each member that joins or fails is one line in the
// lighthouse's log.
func TestTheSteadyStateIsSilentAndEachEventIsALine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 2)
		a, b := c.StartGroup("a", 1), c.StartGroup("b", 1)
		steps := func(from, until int64, groups ...*fttest.Group) {
			for step := from; step < until; step++ {
				round(t, step, groups...)
				for _, g := range groups {
					var votes []<-chan fttest.Answer[bool]
					for rank := range g.Ranks {
						votes = append(votes, g.Vote(rank, step, true, time.Minute))
					}
					for _, vote := range votes {
						assert.NoError(t, (<-vote).Err)
					}
				}
				time.Sleep(100 * time.Millisecond)
			}
		}
		most := int64(200)
		if testmain.Full() {
			most = 1000
		}
		steps(1, 3, a, b)
		before := c.Log.Count("")
		steps(3, most, a, b)
		assert.Equal(t, before, c.Log.Count(""), "%s", c.Log.String())

		joining := c.StartGroup("c", 1)
		first := joining.Quorum(0, most, time.Minute)
		synctest.Wait() // the new member asks before the others do
		round(t, most, a, b)
		assert.NoError(t, (<-first).Err)
		steps(most+1, most+10, a, b, joining)
		assert.Equal(t, 1, c.Log.Count("joined=[c]"), "%s", c.Log.String())
		joining.Host(-1).Kill()
		joining.Server.Shutdown()
		time.Sleep(time.Second)
		steps(most+10, most+20, a, b)
		assert.Equal(t, 1, c.Log.Count(`level=WARN msg="torchft: a member failed"`), "%s", c.Log.String())
		assert.Equal(t, 1, c.Log.Count("left=[c]"), "%s", c.Log.String())
	})
}

// The ranks log the warning of a regression, so the manager server, which shares the stderr of rank 0, logs
// none.
func TestARegressionIsAWarningOfTheLighthouseOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fttest.NewCluster(t, 1)
		a := c.StartGroup("a", 1)
		round(t, 5, a)
		a.Host(-1).Kill()
		a.Server.Shutdown()
		time.Sleep(time.Minute)
		b := c.StartGroup("b", 1)
		round(t, 0, b)
		synctest.Wait()
		assert.Equal(t, 2, c.Log.Count("THE JOB REGRESSES"), "%s", c.Log.String())
		assert.Equal(t, 1, c.Log.Count(`level=WARN msg="torchft: THE JOB REGRESSES`), "%s", c.Log.String())
	})
}
