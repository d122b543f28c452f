package heal

import (
	"fmt"
	"time"
)

// retries says when a source is asked again: the one policy of the streams of a transfer. Its zero value does not.
type retries struct {
	most  int           // attempts in a row that bring nothing, before the source is given up
	pause time.Duration // before the second of them; each later one waits twice as long
}

var patient = retries{most: 6, pause: 20 * time.Millisecond}

// inARow counts attempts that brought nothing, this one too.
func inARow(before int, progress bool) int {
	if progress {
		return 1
	}
	return before + 1
}

// after says what follows so many failed attempts in a row.
func (r retries) after(failed int) (pause time.Duration, again bool) {
	if failed >= r.most {
		return 0, false
	}
	return r.pause << (failed - 1), true
}

// mostGarbled bounds how often one block may arrive garbled, and how many wrong blocks an additional source may give: then it is no
// accident of the wire.
const mostGarbled = 8

// Why a source is not asked again in a transfer, whatever its connections do.
type (
	// withdrawnError is what it said itself: it has the state no longer.
	withdrawnError struct{ reason string }
	// slowError is that others wait for its block.
	slowError struct{}
	// wrongError is that it gave blocks that are not the assigned source's.
	wrongError struct{ count, last int }
)

func (e withdrawnError) Error() string { return e.reason }

func (slowError) Error() string {
	return fmt.Sprintf("slow: one block took more than %v while other streams had nothing to do", slowAfter)
}

func (e wrongError) Error() string {
	return fmt.Sprintf("it gave %d blocks, the last of them %d, that are not those of the assigned source", e.count, e.last)
}
