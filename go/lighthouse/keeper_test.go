package lighthouse

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
)

// A disk that hangs (a slow NFS, an fsync that does not return) keeps neither a job nor the end of the lighthouse waiting.
func TestADiskThatHangsHoldsNobodyUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j, _ := crowd(1)
		disk := make(chan struct{})
		j.keeper = newKeeper("/state", j.log, func(string, state, func() bool) error {
			<-disk
			return nil
		})
		start := time.Now()
		for id := range int64(3) {
			j.keeper.keep(state{Highest: id})
			synctest.Wait()
		}
		assert.Zero(t, time.Since(start), "a quorum waits for no write")
		j.shutDown()
		j.keeper.wait()
		assert.Equal(t, lastWrite, time.Since(start))
		assert.True(t, j.keeper.left.Load(), "what comes late must not overwrite what another lighthouse wrote")
		close(disk)
	})
}
