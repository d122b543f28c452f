package heal

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestWhenASourceIsAskedAgain(t *testing.T) {
	const first = 20 * time.Millisecond
	for name, c := range map[string]struct {
		policy   retries
		progress []bool // of each failed attempt: whether it fetched a block
		pauses   []time.Duration
		ended    bool
	}{
		"nothing comes": {
			defaultRetries, []bool{false, false, false, false, false, false},
			[]time.Duration{first, 2 * first, 4 * first, 8 * first, 16 * first}, true,
		},
		"something came": {
			defaultRetries, []bool{false, false, true, false, true},
			[]time.Duration{first, 2 * first, first, 2 * first, first}, false,
		},
		"it breaks often, but makes progress": {
			defaultRetries, []bool{true, true, true, true, true, true, true, true},
			[]time.Duration{first, first, first, first, first, first, first, first}, false,
		},
		"once":  {retries{most: 1}, []bool{true}, nil, true},
		"never": {retries{}, []bool{false}, nil, true},
	} {
		t.Run(name, func(t *testing.T) {
			var pauses []time.Duration
			failed, ended := 0, false
			for _, progress := range c.progress {
				require.False(t, ended)
				if failed++; progress {
					failed = 1
				}
				pause, again := c.policy.after(failed)
				if ended = !again; again {
					pauses = append(pauses, pause)
				}
			}
			require.Equal(t, c.pauses, pauses)
			require.Equal(t, c.ended, ended)
		})
	}
}
