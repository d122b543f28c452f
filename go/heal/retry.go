package heal

import (
	"fmt"
	"time"
)

// retries is the retry policy of all streams of a transfer. The zero value does not retry.
type retries struct {
	most  int           // failed attempts in a row without a block, after which the source counts as failed
	pause time.Duration // before the second attempt; it doubles with each later one
}

// defaultRetries bridge an interruption of 0.6 s: the pauses add up to that.
var defaultRetries = retries{most: 6, pause: 20 * time.Millisecond}

// after returns whether to retry after this many failed attempts in a row, and the pause before the retry.
func (r retries) after(failed int) (pause time.Duration, again bool) {
	if failed >= r.most {
		return 0, false
	}
	return r.pause << (failed - 1), true
}

// mostGarbled bounds how often one block may arrive garbled, and how many wrong blocks an additional source
// may deliver. If there are more, they are not transmission errors.
const mostGarbled = 8

// busyError: the source has no room for this connection now. That is no failure: the stream connects again,
// as long as the transfer lives, and the other streams go on.
type busyError struct{ retryAfter time.Duration }

const longestRetryAfter = 10 * time.Second

func (e busyError) Error() string {
	return fmt.Sprintf("the source has too many connections; retry after %v", e.retryAfter)
}

// The reasons why a source is not asked again in a transfer.
type (
	// withdrawnError: the source's offer has ended, with this reason.
	withdrawnError struct{ reason string }
	// slowError: streams of other sources were idle while the source took too long for a block.
	slowError struct{}
	// wrongError: the source's blocks differ from those of the assigned source.
	wrongError struct{ count, last int }
)

func (e withdrawnError) Error() string { return e.reason }

func (slowError) Error() string {
	return fmt.Sprintf("slow: one block took more than %v while other streams had nothing to do", slowAfter)
}

func (e wrongError) Error() string {
	return fmt.Sprintf("it gave %d blocks, the last of them %d, that are not those of the assigned source",
		e.count, e.last)
}
