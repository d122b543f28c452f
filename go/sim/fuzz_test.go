package sim

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const (
	setupBytes = 4 // the bytes of a schedule before its faults
	faultBytes = 7
	mostFaults = 16
)

// schedule decodes a job from the first bytes, and its faults from the others. Any bytes are valid. A change of a byte after the
// first three causes only a small change of the schedule, which helps the fuzzer.
func schedule(b []byte) Setup {
	var head [setupBytes]byte
	b = b[copy(head[:], b):]
	s := Draw(uint64(head[0])|uint64(head[1])<<8, 1+int(head[2]%6), 60)
	s.Cluster, s.Ranks = head[3]%2 == 1, 1+int(head[3]/2%2)
	s.Faults = nil
	for round := 1; len(b) > 0 && len(s.Faults) < mostFaults; {
		var f [faultBytes]byte
		b = b[copy(f[:], b):]
		round = min(round+int(f[0]%16), s.Rounds)
		fault := Fault{
			Round: round,
			Kind:  FaultKind(int(f[1]) % int(faultKinds)),
			Slots: Slots(f[2]) & (1<<s.Slots - 1),
			After: time.Duration(f[3]) * 4 * s.Compute / 256,
			For:   time.Duration(f[4]) * (s.Policy.HeartbeatTimeout + s.Timeout) / 256,
			N:     int64(f[5]%16) * int64(1+f[6]/16),
		}
		if fault.Kind == RankFails {
			fault.N %= int64(s.Ranks)
		}
		switch fault.Kind {
		case Partition, CutLighthouse, CutUp, CutDown: // without an end, the group would be cut off for good, and form no quorum
			fault.For = max(fault.For, time.Millisecond)
		}
		if fault.Kind.ofLighthouse() {
			fault.Slots = 0
		} else if fault.Slots == 0 {
			fault.Slots = 1
		}
		s.Faults = append(s.Faults, fault)
	}
	return s
}

// FuzzHistory runs the schedule that arbitrary bytes decode to. The coverage of the machines guides the fuzzer.
func FuzzHistory(f *testing.F) {
	f.Add([]byte("\x01\x00\x03\x00"))
	f.Fuzz(func(t *testing.T, b []byte) {
		s := schedule(b)
		r := Run(s, nil)
		if r.Broken != nil {
			t.Fatalf("%v\nshrunk:\n%s", r.Broken, History(Shrink(s, r.Broken.Rule, 500), 100))
		}
	})
}

func TestEveryKindOfFaultCanBeDecoded(t *testing.T) {
	for kind := range byte(faultKinds) {
		s := schedule([]byte{0, 0, 4, 1, 3, kind, 2, 64, 128, 5, 16})
		require.Len(t, s.Faults, 1)
		require.Equal(t, FaultKind(kind), s.Faults[0].Kind)
	}
	require.Empty(t, schedule(nil).Faults)
	require.Len(t, schedule(make([]byte, 1000)).Faults, mostFaults)
}
