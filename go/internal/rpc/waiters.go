package rpc

// Waiters has the calls that wait for an answer, by the id that the machine uses for them. It is not safe for
// concurrent use: the server's own lock guards it.
type Waiters[ID ~uint64, A any] struct {
	next ID
	open map[ID]func(A)
}

// Add adds a waiter. Its channel receives at most one answer and never blocks the sender.
func (w *Waiters[ID, A]) Add() (ID, <-chan A) {
	answer := make(chan A, 1)
	return w.AddFunc(func(a A) { answer <- a }), answer
}

// AddFunc adds a waiter whose answer, at most one, is passed to a function that must not block.
func (w *Waiters[ID, A]) AddFunc(answer func(A)) ID {
	if w.open == nil {
		w.open = map[ID]func(A){}
	}
	w.next++
	w.open[w.next] = answer
	return w.next
}

// Answer ends a waiter. An unknown id is ignored: it belongs to a cancelled call.
func (w *Waiters[ID, A]) Answer(id ID, answer A) {
	if waiter, ok := w.open[id]; ok {
		delete(w.open, id)
		waiter(answer)
	}
}

// Drop removes the waiter of a cancelled call.
func (w *Waiters[ID, A]) Drop(id ID) { delete(w.open, id) }

// AnswerAll ends every waiter.
func (w *Waiters[ID, A]) AnswerAll(answer A) {
	for id := range w.open {
		w.Answer(id, answer)
	}
}
