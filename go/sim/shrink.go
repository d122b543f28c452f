package sim

import (
	"fmt"
	"math/bits"
	"slices"
	"strings"
	"time"
)

// Shrink searches for a smaller setup that breaks the same rule: with fewer faults, groups and rounds, and a network that loses
// less. It makes at most `tries` runs.
func Shrink(s Setup, rule string, tries int) Setup {
	h := &shrinker{best: s, rule: rule, tries: tries}
	h.cutShort()
	for before := (Setup{}); !sameSize(before, h.best) && h.tries > 0; {
		before = h.best
		h.dropFaults()
		h.calmNetwork()
		h.dropGroups()
		h.simplerFaults()
		h.sooner()
	}
	return h.best
}

type shrinker struct {
	best  Setup
	rule  string
	tries int
}

func sameSize(a, b Setup) bool {
	return len(a.Faults) == len(b.Faults) && a.Slots == b.Slots && a.Ranks == b.Ranks && a.Rounds == b.Rounds
}

// try adopts a setup if it breaks the rule. It tries several seeds, since with the same seed a smaller setup has an unrelated
// history.
func (h *shrinker) try(change func(*Setup)) bool {
	s := h.best
	s.Faults = slices.Clone(s.Faults)
	change(&s)
	for range 5 {
		if h.tries--; h.tries < 0 {
			return false
		}
		if b := Run(s, nil).Broken; b != nil && b.Rule == h.rule {
			h.best = s
			h.cutShort()
			return true
		}
		s.Seed++
	}
	return false
}

// cutShort removes the faults after the moment at which the rule was broken.
func (h *shrinker) cutShort() {
	b := Run(h.best, nil).Broken
	faults := h.best.Faults
	for len(faults) > 0 && faults[len(faults)-1].Round > b.Round {
		faults = faults[:len(faults)-1]
	}
	h.best.Faults = slices.Clip(faults)
	h.best.Rounds = min(h.best.Rounds, b.Round+1)
}

// dropFaults removes halves of the schedule, then quarters, down to single faults.
func (h *shrinker) dropFaults() {
	for size := len(h.best.Faults); size > 0 && h.tries > 0; size /= 2 {
		for i := 0; i < len(h.best.Faults); {
			if !h.try(func(s *Setup) { s.Faults = slices.Delete(s.Faults, i, min(i+size, len(s.Faults))) }) {
				i += size
			}
		}
	}
}

func (h *shrinker) calmNetwork() {
	if h.best.Loss+h.best.Duplicate+h.best.Straggle > 0 {
		h.try(func(s *Setup) { s.Loss, s.Duplicate, s.Straggle = 0, 0, 0 })
	}
	if h.best.Ranks > 1 {
		h.try(func(s *Setup) { s.Ranks = 1 })
	}
}

// dropGroups removes the last slots, many at first.
func (h *shrinker) dropGroups() {
	for n := h.best.Slots / 2; n > 0; {
		if h.best.Slots-n < 1 || !h.try(func(s *Setup) {
			s.Slots -= n
			s.Policy.MinReplicas = min(s.Policy.MinReplicas, s.Slots)
			for i := range s.Faults {
				if f := &s.Faults[i]; f.Slots != 0 {
					if f.Slots &= 1<<s.Slots - 1; f.Slots == 0 {
						f.Slots = 1
					}
				}
			}
		}) {
			n /= 2
		}
	}
}

func (h *shrinker) simplerFaults() {
	for i := 0; i < len(h.best.Faults); i++ {
		f := h.best.Faults[i]
		if bits.OnesCount64(uint64(f.Slots)) > 1 {
			h.try(func(s *Setup) { s.Faults[i].Slots &= -s.Faults[i].Slots })
		}
		if f.After > 0 {
			h.try(func(s *Setup) { s.Faults[i].After = 0 })
		}
		i = min(i, len(h.best.Faults)-1)
	}
}

// sooner moves the faults, and so the end of the run, to earlier rounds.
func (h *shrinker) sooner() {
	for by := h.best.Rounds / 2; by > 0; {
		if h.best.Rounds <= by || !h.try(func(s *Setup) {
			s.Rounds -= by
			for i := range s.Faults {
				s.Faults[i].Round = max(1, s.Faults[i].Round-by)
			}
		}) {
			by /= 2
		}
	}
}

// History returns a run as text: the cluster, its faults, and the last events.
func History(s Setup, most int) string {
	var lines []string
	r := Run(s, func(at time.Duration, line string) {
		lines = append(lines, fmt.Sprintf("%9.3fs %s", at.Seconds(), line))
	})
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d: %d groups of %d ranks, min_replicas %d, join %s, heartbeat %s, quorum %s, timeout %s, init_sync %t\n",
		s.Seed, s.Slots, s.Ranks, s.Policy.MinReplicas, short(s.Policy.JoinTimeout), short(s.Policy.HeartbeatTimeout),
		short(s.QuorumTimeout), short(s.Timeout), s.InitSync)
	if s.Loss+s.Duplicate+s.Straggle > 0 {
		fmt.Fprintf(&b, "messages: %g lost, %g doubled, %g overtaken\n", s.Loss, s.Duplicate, s.Straggle)
	}
	for _, f := range s.Faults {
		fmt.Fprintf(&b, "%s\n", f)
	}
	lines = fold(lines)
	if n := len(lines) - most; n > 0 {
		fmt.Fprintf(&b, "… %d lines\n", n)
		lines = lines[n:]
	}
	fmt.Fprintf(&b, "%s\n", strings.Join(lines, "\n"))
	if r.Broken == nil {
		b.WriteString("no rule is broken\n")
	}
	return b.String()
}

// fold removes the middle of long sequences of lines in which the same groups only commit, or only lose, steps.
func fold(lines []string) []string {
	const keep = 4 // lines kept at each end of a sequence
	var out []string
	for i := 0; i < len(lines); {
		end := i
		for end < len(lines) && routine(lines, end) {
			end++
		}
		if n := end - i - 2*keep; n > 0 {
			out = append(out, lines[i:i+keep]...)
			out = append(out, fmt.Sprintf("           … %d lines like these", n))
			out = append(out, lines[end-keep:end]...)
		} else {
			end = min(max(end, i+1), len(lines))
			out = append(out, lines[i:end]...)
		}
		i = end
	}
	return out
}

// routine reports whether a line is about a decision, or about a quorum with the same members as the previous one, for which no
// reason is logged.
func routine(lines []string, i int) bool {
	const time = 11 // columns
	text := lines[i][time:]
	if strings.HasPrefix(text, "quorum ") {
		return i+1 < len(lines) && !strings.HasPrefix(lines[i+1][time:], "  because")
	}
	return strings.Contains(text, " commits step ") || strings.Contains(text, " loses step ")
}

func short(d time.Duration) time.Duration { return d.Round(time.Millisecond) }
