package testmain

import (
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func TestMain(m *testing.M) { Run(m) }

func TestTimersOfABubbleDoNotCrashTheRaceDetector(t *testing.T) {
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
						t.Error("a due timer has not fired")
					}
				}
			})
		}
		pollers.Wait()
	})
}

// recorded is a testing.TB that records whether a test was skipped.
type recorded struct {
	testing.TB
	how string
}

func (r *recorded) Helper()          {}
func (r *recorded) Skip(why ...any)  { r.how = "skipped: " + fmt.Sprint(why...) }
func (r *recorded) Fatal(why ...any) { panic("failed: " + fmt.Sprint(why...)) }

func TestASkipFailsUnderCI(t *testing.T) {
	for ci, want := range map[string]string{
		"": "skipped: one processor", "0": "skipped: one processor",
		"1":    "failed: skipped under CI=true: one processor",
		"true": "failed: skipped under CI=true: one processor",
	} {
		t.Setenv("CI", ci)
		one := &recorded{TB: t}
		func() {
			defer func() {
				if failed := recover(); failed != nil {
					one.how = fmt.Sprint(failed)
				}
			}()
			Skip(one, "one processor")
		}()
		if one.how != want {
			t.Errorf("CI=%q: %s, and not %s", ci, one.how, want)
		}
	}
}
