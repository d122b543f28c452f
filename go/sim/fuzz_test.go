package sim

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const (
	jobBytes   = 4 // the bytes of a history before its faults
	faultBytes = 6
	mostFaults = 16
)

// decoded returns the history of arbitrary bytes: a job, and its faults. A change of a byte after the first
// three changes the schedule only a little, which helps the fuzzer.
func decoded(b []byte) setup {
	var head [jobBytes]byte
	b = b[copy(head[:], b):]
	s := draw(uint64(head[0])|uint64(head[1])<<8, 1+int(head[2]%5))
	s.ranks, s.faults = 1+int(head[3]%2), nil
	for at := 3 * time.Second; len(b) > 0 && len(s.faults) < mostFaults; {
		var f [faultBytes]byte
		b = b[copy(f[:], b):]
		at += time.Duration(f[0]) * 16 * time.Millisecond
		next := fault{
			at:    at,
			kind:  faultKind(int(f[1]) % int(faultKinds)),
			slots: max(1, slots(f[2])&(1<<s.slots-1)),
			lasts: time.Duration(1+int64(f[3])) * (s.policy.HeartbeatTimeout + s.timeout) / 256,
			n:     int64(f[4]%16) * int64(1+f[5]/16),
		}
		if next.kind == rankFails || next.kind == signal {
			next.n %= int64(s.ranks)
		}
		s.faults = append(s.faults, next)
	}
	return s
}

// FuzzHistory plays the history that arbitrary bytes decode to.
func FuzzHistory(f *testing.F) {
	f.Add([]byte("\x01\x00\x03\x00"))
	f.Add([]byte("\x05\x00\x03\x03\x08\x18\x01\x20\x00\x00\x00\x08\x14\x02\x20\x60\x01\x00\x04\x02\x05\x10\x80\x01\x00\x05\x17\x02\x00\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, b []byte) { hold(t, decoded(b)) })
}

func TestEveryKindOfFaultCanBeDecoded(t *testing.T) {
	for kind := range byte(faultKinds) {
		s := decoded([]byte{0, 0, 4, 1, 3, kind, 2, 64, 5, 16})
		require.Len(t, s.faults, 1)
		require.Equal(t, faultKind(kind), s.faults[0].kind)
	}
	require.Empty(t, decoded(nil).faults)
	require.Len(t, decoded(make([]byte, 1000)).faults, mostFaults)
}
