package quorum

import (
	"fmt"
	"testing"
	"time"
)

// BenchmarkRound is all that the machine does for a round in which every member asks once: what it costs
// must grow with the members, not with their square.
func BenchmarkRound(b *testing.B) {
	for _, n := range []int{1000, 10000} {
		b.Run(fmt.Sprintf("members=%d", n), func(b *testing.B) {
			m := NewMachine(Policy{MinReplicas: n, JoinTimeout: time.Second, HeartbeatTimeout: 5 * time.Second}, epoch)
			members := make([]Member, n)
			for i := range members {
				members[i] = Member{ReplicaID: fmt.Sprintf("replica_%06d", (i*7919)%n), WorldSize: 8}
			}
			now, waiter := epoch, WaiterID(0)
			b.ReportAllocs()
			for b.Loop() {
				now = now.Add(10 * time.Millisecond)
				var actions []Action
				for _, member := range members {
					waiter++
					actions = m.Step(Asked{Waiter: waiter, Member: member}, now)
				}
				if d, ok := actions[0].(Deliver); !ok || len(d.Waiters) != n {
					b.Fatal("not everybody was answered")
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/member")
		})
	}
}

// BenchmarkBeat is one heartbeat among many members.
func BenchmarkBeat(b *testing.B) {
	for _, n := range []int{1000, 10000} {
		b.Run(fmt.Sprintf("members=%d", n), func(b *testing.B) {
			m := NewMachine(Policy{MinReplicas: 1, JoinTimeout: time.Second, HeartbeatTimeout: 5 * time.Second}, epoch)
			ids := make([]string, n)
			for i := range ids {
				ids[i] = fmt.Sprintf("replica_%06d", i)
			}
			now, i := epoch, 0
			b.ReportAllocs()
			for b.Loop() {
				now = now.Add(time.Microsecond)
				m.Step(Beat{ReplicaID: ids[i%n]}, now)
				i++
			}
		})
	}
}
