package rendezvous

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/transcript"
)

// The commands of a transcript:
//
//	nnodes MIN MAX [sizes=] [last=]   settings of the nodes that follow
//	start NODE...                     the nodes announce that they are starting
//	ask NODE...                       the nodes ask for a round; a start before that is not required
//	regroup                           each training node whose view shows waiting nodes restarts its workers, and asks again
//	cut, back NODE...                 their connections break, and come back
//	leave, finish NODE...             the nodes end; with finish, because their work is done
//	after DURATION                    time passes
//	restart [forgetful]               the lighthouse restarts with its state or, if forgetful, without it
//	why                               prints why no round is released
//
// NODE is a name or, for a node of a named group, GROUP/NAME.
func TestTranscripts(t *testing.T) {
	transcript.Test(t, func(t *testing.T) func(words []string) []string {
		w := newWorld()
		settings := Settings{Min: 1, Max: 4, Sizes: "all", LastCallMS: 30_000}
		each := func(words []string, do func(*agent)) {
			for _, word := range words[1:] {
				a := w.agents[word]
				if a == nil {
					group, _, found := strings.Cut(word, "/")
					if !found {
						group = ""
					}
					a = &agent{group: group, name: word, settings: settings}
					w.agents[word] = a
				}
				do(a)
			}
		}
		return func(words []string) []string {
			w.out = nil
			switch words[0] {
			case "nnodes":
				settings.Min, settings.Max = int(transcript.Number(t, words[1])),
					int(transcript.Number(t, words[2]))
				if s := transcript.Option(words, "sizes"); s != "" {
					settings.Sizes = s
				}
				if s := transcript.Option(words, "last"); s != "" {
					settings.LastCallMS = transcript.Duration(t, s).Milliseconds()
				}
			case "start":
				each(words, func(*agent) { w.poll() })
			case "ask":
				each(words, func(a *agent) { w.ask(a) })
			case "regroup":
				for again := true; again; {
					again = false
					for _, a := range w.sorted() {
						if a.trains() && a.view.Waiting > 0 {
							w.ask(a)
							again = true
						}
					}
				}
			case "cut":
				each(words, w.cut)
			case "back":
				each(words, func(a *agent) { a.cut = false; w.poll() })
			case "leave", "finish":
				each(words, func(a *agent) { w.leave(a, words[0] == "finish") })
			case "after":
				w.pass(transcript.Duration(t, words[1]))
			case "restart":
				if slices.Contains(words, "forgetful") {
					w.restart(State{})
				} else {
					w.restart(w.kept)
				}
			case "why":
				for _, g := range slices.Sorted(func(yield func(string) bool) {
					for name := range w.m.groups {
						if !yield(name) {
							return
						}
					}
				}) {
					w.printf("%s", w.m.groups[g].reason)
				}
			default:
				require.Fail(t, "there is no command", words[0])
			}
			return w.out
		}
	})
}
