package testmain

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func TestMain(m *testing.M) { Run(m) }

func TestABubblesTimersCrashNoDetector(t *testing.T) {
	synctest.Test(t, func(*testing.T) {
		var pollers sync.WaitGroup
		for range 8 {
			pollers.Go(func() {
				for range 20_000 {
					timer := time.NewTimer(time.Microsecond)
					time.Sleep(time.Millisecond)
					select {
					case <-timer.C:
					default:
						t.Error("a timer that is due has not fired")
					}
				}
			})
		}
		pollers.Wait()
	})
}
