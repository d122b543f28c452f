package sim

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// countLosses returns the setup of a job whose lost steps are counted: no step is replayed, and there are no random faults.
func countLosses(seed uint64, rounds int) Setup {
	s := Draw(seed, 3+int(seed%4), rounds)
	s.Loss, s.Duplicate, s.Straggle = 0, 0, 0
	s.Replay, s.Calls, s.CountLosses = false, 0, true
	s.Policy.MinReplicas = 1 // otherwise a step with a healing group is lost if there are too few others
	s.Faults = nil
	return s
}

// No group loses more steps by a fault than the table of docs/correctness.md allows for its kind, at any moment of a step.
func TestEachFaultCostsAtMostItsSteps(t *testing.T) {
	t.Parallel()
	for kind := range faultKinds {
		t.Run(faultWords[kind], func(t *testing.T) {
			lost := uint64(0)
			for seed := range uint64(budget(16, 3)) {
				s := countLosses(seed, 60)
				f := drawFault(rand.New(rand.NewPCG(seed, 6)), s)
				if kind >= drawnKinds {
					f.Kind = kind
				}
				for f.Kind != kind { // until a fault of this kind is drawn, with its parameters
					f = drawFault(rand.New(rand.NewPCG(seed+uint64(f.After), 6)), s)
				}
				f.Round = 20
				if f.Slots != 0 {
					f.Slots = 1 << (seed % uint64(s.Slots))
				}
				s.Faults = []Fault{f}
				lost += hold(t, s).Lost
			}
			if none := (&Fault{Kind: kind}).cost(&Setup{Timeout: 1, Ranks: 1}) == 0; none {
				require.Zero(t, lost)
			}
		})
	}
}

// Faults that are far apart cost together no more than the sum of what each of them may cost alone.
func TestFaultsFarApartCostNoMoreThanTheirSum(t *testing.T) {
	t.Parallel()
	var lost uint64
	for seed := range uint64(budget(60, 6)) {
		s := countLosses(seed, 700)
		r := rand.New(rand.NewPCG(seed, 7))
		for round := 20; round <= 600; round += 60 + int(2*s.bound()/(s.Compute+time.Millisecond))/8 {
			f := drawFault(r, s)
			f.Round = round
			if f.Slots != 0 {
				f.Slots &= -f.Slots
			}
			if f.Kind == Noise {
				f.Kind, f.Slots = Crash, 1
			}
			s.Faults = append(s.Faults, f)
		}
		lost += hold(t, s).Lost
	}
	require.NotZero(t, lost)
}
