package lighthouses

// mostUnanswered is how many heartbeats in a row one of several lighthouses may leave unanswered.
const mostUnanswered = 3

// hearing counts the intervals in which a lighthouse has sent nothing. It counts intervals, and does not look at a clock: after a pause of
// this process or of its host, one interval has passed, and messages that arrived meanwhile are read in the next one.
type hearing struct {
	heard int64 // number of messages at the last tick
	mute  int   // intervals since the last message
}

// tick ends an interval; heard is the number of messages so far. It reports whether the lighthouse counts as silent.
func (h *hearing) tick(heard int64) (silent bool) {
	if h.mute++; heard != h.heard {
		h.heard, h.mute = heard, 0
	}
	return h.mute >= mostUnanswered
}
