package quorum

import "cmp"

// reconnect is why the members of the latest quorum must reconnect with the next one, although they may be the same: the
// next quorum then has an id of its own. Of several reasons one is named, the gravest.
//
// Invariants:
//
//  1. A member whose failure was reported to the others is in no quorum with them under the same id: they have ended what they
//     shared with it, and would wait for it in a collective that it does not know to be over.
//  2. While there is a reason, no answer is redelivered (redeliver.go): its quorum is not to be used any more.
type reconnect struct {
	failed string // its failure was reported to members; empty: none was
	other  string // there is another reason; empty: there is none
}

// memberFailed: the failure of a member was reported to the others. If it is back, they must reconnect all the same.
func (r *reconnect) memberFailed(id string) { r.failed = id + " failed" }

// rejoined: a member that left asks again. It has ended what it shared with the others.
func (r *reconnect) rejoined(id string) { r.other = id + " had left, and is back" }

// moved: another process asks in the name of a member. The others are connected with the first one.
func (r *reconnect) moved(id string) {
	if r.other == "" {
		r.other = "another process asks as " + id
	}
}

func (r *reconnect) needed() bool { return r.failed != "" || r.other != "" }

func (r *reconnect) reason() string { return cmp.Or(r.failed, r.other) }

// forget is for another latest quorum, in which no end was reported to anybody. Another reason may be later than that quorum, and stays.
func (r *reconnect) forget() { r.failed = "" }
