package auth

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A disk that does not answer must not stop a server: it accepts connections, and checks calls, with what it
// has read before.
func TestAHangingDiskDoesNotHoldUpCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "file")
		write := func(content string) { require.NoError(t, os.WriteFile(path, []byte(content), 0o600)) }
		write("old")
		hangs := make(chan struct{})
		w, err := watch(slog.New(slog.DiscardHandler), []string{path}, func() (string, error) {
			content, err := os.ReadFile(path)
			if string(content) != "old" {
				<-hangs
			}
			return string(content), err
		})
		require.NoError(t, err)
		write("newer")
		time.Sleep(statEvery)
		got := make(chan string, 3)
		for range cap(got) {
			go func() { got <- w.Get() }()
		}
		for range cap(got) {
			select {
			case value := <-got:
				assert.Equal(t, "old", value)
			case <-time.After(time.Second):
				require.Fail(t, "a call waits for the disk")
			}
		}
		before := time.Now()
		assert.Equal(t, "old", w.Get())
		assert.Equal(t, before, time.Now(), "only the first calls wait")
		close(hangs)
		synctest.Wait()
		assert.Equal(t, "newer", w.Get())

		write("newest")
		time.Sleep(statEvery)
		assert.Equal(t, "newest", w.Get(), "a disk that answers is waited for")
	})
}

func TestASecretOfAnotherUserIsReadByItsGroup(t *testing.T) {
	for mode, want := range map[os.FileMode]struct{ own, ofOther bool }{
		0o600: {},
		0o440: {own: true},
		0o644: {own: true, ofOther: true},
	} {
		assert.Equal(t, want.own, exposed(mode, false), mode)
		assert.Equal(t, want.ofOther, exposed(mode, true), mode)
	}
}
