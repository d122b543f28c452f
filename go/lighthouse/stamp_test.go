package lighthouse

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/quorum"
)

// The age of the newest answered stamp when a process ends determines how much time the lighthouse has to learn of that end.
// According to quorum.BondTime it is at most two and a half intervals. A message that arrives less than
// half an interval after a stamp answers that stamp and triggers no other one; the next message triggers one, and the message after
// that answers it.
func TestTheNewestAnsweredStampIsAtMostTwoAndAHalfIntervalsOld(t *testing.T) {
	const interval = quorum.BondTime / quorum.StampsInBond
	rng := rand.New(rand.NewPCG(1, 2))
	one := stamps{interval: interval}
	now := time.UnixMilli(0)
	held, answered := one.next(now), now
	var oldest time.Duration
	for range 100_000 {
		now = now.Add(1 + time.Duration(rng.Int64N(int64(interval)))) // a bound member sends a message in each interval
		oldest = max(oldest, now.Sub(answered))                       // its process ends just before it sends that message
		carried := held
		if one.due(now) {
			held = one.next(now)
		}
		if sent, news := one.answer(carried); news {
			answered = sent
		}
	}
	require.LessOrEqual(t, oldest, 5*interval/2)
	require.Greater(t, oldest, 2*interval)
}
