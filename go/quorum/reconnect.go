package quorum

import "cmp"

// reconnect records why the members of the next quorum must open new connections to each other, even if they
// are the same as in the latest one: the next quorum then has a new id. If there are several reasons, the
// failure is reported.
//
// Invariants:
//
//  1. A member whose failure was reported to the others is in no quorum with them under the same id. They
//     have aborted their collectives with it: under the same id, it would wait in a collective that the
//     others have left.
//  2. While there is a reason, no answer is redelivered (redeliver.go): its quorum must not be used any more.
type reconnect struct {
	failed string // a member's failure that was reported to the others; empty: none
	other  string // another reason; empty: none
}

// memberFailed records that the failure of a member was reported to the others. Even if it comes back, they
// must reconnect.
func (r *reconnect) memberFailed(id string) { r.failed = id + " failed" }

// rejoined records that a member which had left asks again. It has closed its connections with the others.
func (r *reconnect) rejoined(id string) { r.other = id + " had left, and is back" }

// moved records that another process asks under the name of a member. The others are connected to the earlier
// process.
func (r *reconnect) moved(id string) {
	if r.other == "" {
		r.other = "another process asks as " + id
	}
}

func (r *reconnect) needed() bool { return r.failed != "" || r.other != "" }

func (r *reconnect) reason() string { return cmp.Or(r.failed, r.other) }

// forget drops the failure when another quorum becomes the latest one, of which no failure has been reported.
// The other reason stays: it may be later than that quorum.
func (r *reconnect) forget() { r.failed = "" }
