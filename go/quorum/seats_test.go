package quorum

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// testdata/standby.txt has the rules for standbys. Here the events are random, and the invariants are checked
// after each.
func TestStandbysAreInNoCountAndNoQuorum(t *testing.T) {
	standbys, letIn, larger := 0, 0, 0
	for seed := range uint64(20) {
		h := newHistory(t, seed)
		h.policy.MaxReplicas = h.policy.MinReplicas + h.rng.IntN(2)
		m := NewMachine(h.policy, epoch, 0)
		held := map[string]bool{}
		for range 500 {
			h.now = h.now.Add(time.Duration(h.rng.IntN(100)) * time.Millisecond)
			event := h.event(6)
			if _, recalled := event.(Recalled); recalled {
				continue // of a job without the limit: none of its members is held back
			}
			if h.rng.IntN(50) == 0 {
				event = Limited{MaxReplicas: h.policy.MinReplicas + h.rng.IntN(4)}
			}
			if limited, ok := event.(Limited); ok {
				h.policy.MaxReplicas = limited.MaxReplicas
			}
			before := m.past.latest
			for _, action := range m.Step(event, h.now) {
				if d, formed := action.(Deliver); formed {
					h.lastID = d.Quorum.ID
					if len(d.Quorum.Members) > h.policy.MaxReplicas { // it was lowered: those that train stay
						larger++
						for _, member := range d.Quorum.Members {
							_, stays := before.Place(member.ReplicaID)
							require.True(t, stays, "%s is let in, and no seat is free", member.ReplicaID)
						}
					}
					for _, member := range d.Quorum.Members {
						if held[member.ReplicaID] {
							letIn++
						}
					}
				}
			}
			require.Equal(t, recount(m.roster, m.now), m.roster.tally(m.now))
			held = map[string]bool{}
			for id, r := range m.roster.members {
				if !r.held {
					continue
				}
				held[id] = true
				standbys++
				require.False(t, r.previous || r.place != nil)
				require.NotEmpty(t, m.StandsBy(id))
				ends := m.seats.taken && m.roster.counts.present > 0
				require.True(t, ends || m.roster.counts.healthy >= h.policy.MaxReplicas,
					"a group is held back, and a seat is free")
			}
		}
	}
	require.Greater(t, standbys, 1000)
	require.Greater(t, letIn, 10)
	require.Greater(t, larger, 10)
}
