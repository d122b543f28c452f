package lighthouse

import (
	"errors"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// slowLog is a log of which each proposal waits for next.
type slowLog struct {
	agreed
	done sync.WaitGroup
	next chan error
	seen []string // what happened, in order
}

func newSlowLog() *slowLog {
	l := &slowLog{next: make(chan error)}
	l.agreed = agreed{
		log: slog.New(slog.DiscardHandler), tasks: &l.done,
		propose: func([]byte) error { return <-l.next },
		lost:    func(err error) { l.seen = append(l.seen, "lost") },
	}
	return l
}

func (l *slowLog) answer(what string) bool {
	return l.once(func() { l.seen = append(l.seen, what) })
}

// Each answer comes after the state that it belongs to, and after the answers before it.
func TestAnswersFollowTheLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newSlowLog()
		require.False(t, l.answer("at once"))
		l.keep(state{Highest: 1})
		require.True(t, l.answer("1"))
		synctest.Wait()
		require.True(t, l.answer("1 again"))
		l.keep(state{Highest: 2})
		require.True(t, l.answer("2"))
		synctest.Wait()
		assert.Empty(t, l.seen)
		l.next <- nil
		synctest.Wait()
		assert.Equal(t, []string{"1", "1 again"}, l.seen)
		l.next <- nil
		synctest.Wait()
		assert.Equal(t, []string{"1", "1 again", "2"}, l.seen)
		require.False(t, l.answer("at once"))

		l.keep(state{Highest: 3})
		require.True(t, l.answer("3"))
		l.next <- errors.New("another lighthouse leads")
		l.done.Wait()
		require.True(t, l.answer("too late"))
		assert.Equal(t, []string{"1", "1 again", "2", "lost"}, l.seen)
	})
}

// No answer is lost that comes while the last ones are given.
func TestAnswersAtTheEndOfAProposal(t *testing.T) {
	l := newSlowLog()
	l.propose = func([]byte) error { return nil }
	for range 20_000 {
		l.keep(state{Highest: 1})
		answered := make(chan struct{})
		for later := true; later; {
			if later = l.once(func() { close(answered) }); later {
				<-answered
				answered = make(chan struct{})
			}
		}
	}
	l.done.Wait()
}

// A job whose answers fail is lost, and does not wait forever.
func TestAnAnswerThatPanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newSlowLog()
		l.keep(state{Highest: 1})
		require.True(t, l.once(func() { panic("a bug") }))
		l.next <- nil
		l.done.Wait()
		assert.Equal(t, []string{"lost"}, l.seen)
	})
}
