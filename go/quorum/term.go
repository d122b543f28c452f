package quorum

import "fmt"

// The high bits of a quorum_id are a term: that of the leader which formed the quorum, or 0 at a lighthouse
// without a cluster. A new leader has a higher term than all before it, so its new quorums have higher ids.
// Members keep the highest term that they have received, and leave a lighthouse that welcomes them with a
// smaller one. So a deposed leader can at most give answers that nobody acts upon.

// termBits are the bits of a quorum_id below its term: milliseconds since 1970 until the year 2109.
const termBits = 42

// TermOf returns the term in which a quorum was formed: the high bits of its id.
func TermOf(id int64) int64 { return id >> termBits }

// firstID returns the id after which the ids of a machine begin: its term and the milliseconds of its start.
// So a lighthouse that is started later in the same term begins above all ids that this one can have used.
func firstID(term, milliseconds int64) int64 {
	// the bound leaves room for later ids if the clock is wrong
	return term<<termBits + min(max(milliseconds, 0), 1<<termBits-1<<32)
}

// deposed returns the reason to refuse the stream of a member that has received a higher term; empty if the
// stream is accepted. A leader with that term serves the job.
func (m *Machine) deposed(e Greeted) string {
	if e.Term <= m.term {
		return ""
	}
	return fmt.Sprintf("member %s was served in term %d: this lighthouse, of term %d, does not lead any more",
		e.ReplicaID, e.Term, m.term)
}
