package quorum

import "fmt"

// Rank i of a group reduces with rank i of the others. With groups of different sizes, the last ranks of the larger ones would
// wait in every step for peers that do not exist. So a new member of another size is refused, and is never in a quorum with the
// others.
//
// A member that makes calls instead of using a stream is accepted with any size, as by an upstream lighthouse: the world_size
// that such a member sends may differ from the number of its ranks.

// misfit returns the reason to refuse a new member whose size differs from that of the present ones; empty if it is accepted. If
// the size of the others is unknown, it is accepted.
func (m *memory) misfit(e Asked) string {
	size := e.Member.WorldSize
	if r := m.roster.members[e.Member.ReplicaID]; !e.Recallable || size == 0 || r != nil && r.previous {
		return ""
	}
	other := m.unlike(e.Member.ReplicaID, size)
	if other == nil {
		return ""
	}
	return fmt.Sprintf("world_size of member %s is %d, that of member %s, which is in the job, is %d: all groups of a job must have equally many ranks",
		e.Member.ReplicaID, size, other.ReplicaID, other.WorldSize)
}

// unlike returns a member of another size. It returns nil if there is none, or if another member has this size. It looks at the
// members of the latest quorum that have a stream or, if there are none, at those with a pending request.
func (m *memory) unlike(id string, size uint64) (other *Member) {
	here := false
	for i, r := range m.members {
		if !r.alive() || r.presumed || r.suspect != nil {
			continue
		}
		here = true
		switch has := m.latest.Members[i].WorldSize; has {
		case size:
			return nil
		case 0:
		default:
			if other == nil {
				other = &m.latest.Members[i]
			}
		}
	}
	for e := m.roster.queue.Front(); e != nil && !here; e = e.Next() {
		r := e.Value.(*record)
		switch has := r.member().WorldSize; {
		case r.id == id || has == 0:
		case has == size:
			return nil
		default:
			if other == nil {
				other = r.member()
			}
		}
	}
	return other
}
