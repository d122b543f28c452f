package quorum

import (
	"encoding/json"
	"fmt"
	"slices"
)

// Rank i of a group reduces with rank i of the others. With groups of different sizes, the last ranks of the
// larger ones would wait in every step for peers that do not exist. If the tensors differ, a backend such as
// Gloo ends the process of a rank that receives more bytes than it expects, so one edited script would end
// the healthy groups. So a new member that differs in either is refused, and is never in a quorum with the
// others.
//
// A member that makes calls instead of using a stream is accepted with any size, as by an upstream
// lighthouse: the world_size that such a member sends may differ from the number of its ranks.

// property is something in which the members of a job must be alike, if they announce it.
type property struct {
	announced func(*Member) bool
	same      func(a, b *Member) bool
	reason    func(of, than *Member) string // to refuse another one
}

var properties = []property{{
	func(m *Member) bool { return m.WorldSize != 0 },
	func(a, b *Member) bool { return a.WorldSize == b.WorldSize },
	otherSize,
}, {
	func(m *Member) bool { return len(m.Layouts) > 0 },
	func(a, b *Member) bool { return slices.Equal(a.Layouts, b.Layouts) },
	otherLayout,
}}

// differ reports whether two members announce the property, and are different in it.
func (p property) differ(a, b *Member) bool { return p.announced(a) && p.announced(b) && !p.same(a, b) }

// misfit returns the reason to refuse a new member that differs from the present ones; empty if it is
// accepted. What the others do not announce is not compared.
func (m *memory) misfit(e Asked) string {
	id := e.Member.ReplicaID
	if r := m.roster.members[id]; !e.Recallable || r != nil && r.previous {
		return ""
	}
	for _, p := range properties {
		if other := m.unlike(&e.Member, p); other != nil {
			return p.reason(&e.Member, other)
		}
	}
	return ""
}

// outfit refuses the pending requests of new members that differ from a member of the latest quorum, when
// that member asks. A lighthouse that adopted this quorum, after a restart, knew neither size nor layouts of
// its members when the new ones asked.
func (m *memory) outfit(e Asked) {
	if m.latest == nil || !m.adopted || !e.Recallable || !m.roster.members[e.Member.ReplicaID].previous {
		return
	}
	for element := m.roster.queue.Front(); element != nil; {
		r := element.Value.(*record)
		element = element.Next() // before a refusal removes r from the queue
		if r.previous || !r.request.recallable {
			continue
		}
		for _, p := range properties {
			if of := r.member(); p.differ(of, &e.Member) {
				m.misfits(r.id, m.roster.withdraw(r, m.now), p.reason(of, &e.Member))
				break
			}
		}
	}
}

func otherSize(of, than *Member) string {
	return fmt.Sprintf("world_size of member %s is %d, that of member %s, which is in the job, is %d: all "+
		"groups of a job must have equally many ranks",
		of.ReplicaID, of.WorldSize, than.ReplicaID, than.WorldSize)
}

func otherLayout(of, than *Member) string {
	rank := 0
	for ofRank(of.Layouts, rank) == ofRank(than.Layouts, rank) {
		rank++
	}
	return fmt.Sprintf("member %s reduces other tensors than member %s, which is in the job: rank %d has "+
		"%.99s, that of %s has %.99s%s",
		of.ReplicaID, than.ReplicaID, rank, ofRank(of.Layouts, rank), than.ReplicaID,
		ofRank(than.Layouts, rank), linesOf(than, rank))
}

// linesOf returns where a rank's list of its tensors is, for the rank that is refused: it reads the list to
// name the first ones that differ (refused in torchft/_manager/checks/layout.py). It is empty if the rank's
// handle does not say.
func linesOf(m *Member, rank int) string {
	var handle struct{ Store, Layout string }
	if rank >= len(m.Handles) || json.Unmarshal([]byte(m.Handles[rank]), &handle) != nil ||
		handle.Store == "" || handle.Layout == "" {
		return ""
	}
	return fmt.Sprintf("; its list is in the store at %.99s under layout/%.99s", handle.Store, handle.Layout)
}

// ofRank returns the layout of a rank of a member (Member.Layouts).
func ofRank(layouts []string, rank int) string {
	if len(layouts) == 1 {
		return layouts[0]
	}
	if rank < len(layouts) {
		return layouts[rank]
	}
	return ""
}

// unlike returns a member that is different. It returns nil if there is none, or if another member is alike.
// It looks at the members of the latest quorum that have a stream, or are presumed alive. If there are none,
// it looks at those with a pending request: at the start of a job, the first member that asks decides.
func (m *memory) unlike(one *Member, p property) (other *Member) {
	here := false
	fits := func(o *Member) bool {
		if other == nil && p.differ(one, o) {
			other = o
		}
		return p.announced(one) && p.same(one, o)
	}
	for i, r := range m.members {
		if !r.alive() || r.suspect != nil {
			continue
		}
		here = true
		known := &m.latest.Members[i]
		if r.waiting() { // an adopted quorum has neither size nor layouts of its members
			known = r.member()
		}
		// A presumed member is not known yet: outfit compares it when it asks.
		if !r.presumed && fits(known) {
			return nil
		}
	}
	for e := m.roster.queue.Front(); e != nil && !here; e = e.Next() {
		if r := e.Value.(*record); r.id != one.ReplicaID && fits(r.member()) {
			return nil
		}
	}
	return other
}
