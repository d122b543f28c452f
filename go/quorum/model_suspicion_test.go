package quorum

import (
	"slices"
	"time"
)

// The part of the slow model (model_test.go) for members that their peers suspect, and for steps that take
// too long.

func (m *model) suspected(e Suspected, now time.Time) {
	if m.latest == nil || e.QuorumID != m.latest.ID || !m.member(e.Reporter) {
		return
	}
	m.beat(e.Reporter, now)
	if _, again := m.reports[e.Reporter]; again || e.Suspect == e.Reporter {
		return
	}
	m.reports[e.Reporter] = e.Suspect
	for _, id := range m.members() {
		reports := 0
		for _, suspect := range m.reports {
			if suspect == "" || suspect == id {
				reports++
			}
		}
		if m.silent(id, now) && !m.checked[id] && 2*reports > len(m.members())-1 {
			m.checked[id] = true
			m.does("check", id)
		}
	}
}

// silent reports whether a member counts as alive but has neither asked nor reported.
func (m *model) silent(id string, now time.Time) bool {
	_, reported := m.reports[id]
	return !reported && !m.waits(id) && m.healthy(id, now)
}

// tooLong handles a step that takes too long.
func (m *model) tooLong(now time.Time) {
	if m.latest == nil {
		return
	}
	timeout := m.policy.StalledAfter
	if timeout == 0 {
		timeout = max(5*time.Second, 10*m.median(), time.Duration(len(m.latest.Members))*time.Millisecond)
	}
	age, answers := now.Sub(m.began), min(time.Second, timeout/2)
	if m.policy.StalledAfter == 0 && age < 4*time.Second || age < timeout-answers {
		return
	}
	all := true
	for _, id := range m.members() {
		_, answered := m.answers[id]
		all = all && (answered || !m.healthy(id, now) || m.waits(id))
	}
	if age >= timeout && !m.askedAt.IsZero() && (now.Sub(m.askedAt) >= answers || all) {
		m.nameStalled(now, age, timeout)
		m.part(now)
	}
	if m.askedAt.IsZero() || age >= timeout && now.Sub(m.askedAt) >= answers {
		var ask []string
		for _, id := range m.members() {
			if m.healthy(id, now) && !m.waits(id) {
				ask = append(ask, id)
			}
		}
		if len(ask) > 0 {
			m.askedAt, m.answers, m.answeredAt = now, map[string]Progressed{}, map[string]time.Time{}
			m.does("ask", ask)
		}
	}
}

// nameStalled reports the members without progress for which others wait.
func (m *model) nameStalled(now time.Time, age, timeout time.Duration) {
	held := false
	for _, id := range m.members() {
		held = held || m.healthy(id, now) && (m.waits(id) || m.answers[id].Progress.Waits)
	}
	for _, id := range m.members() {
		p, answered := m.answers[id]
		still := age
		if answered {
			still = min(age, p.Progress.For+now.Sub(m.answeredAt[id]))
		}
		if !held || !m.healthy(id, now) || m.waits(id) || p.Progress.Waits || still < timeout ||
			// minutes are too short for it
			p.Progress.Phase == Evaluation && m.policy.EjectStalledAfter <= 0 {
			continue
		}
		if !m.named[id] {
			m.named[id] = true
			m.does("stalled", id)
		}
		switch after := m.policy.EjectStalledAfter; {
		case after == 0, after == EjectAuto && p.Progress.Phase == Unsaid:
		case after == EjectAuto && still < m.autoLimit(), after > 0 && still < after:
		default:
			m.markFailed(id, NoProgress)
		}
	}
}

func (m *model) occupied(id string, p Phase) {
	m.busy = m.busy || p != Unsaid && p != Training && m.member(id)
}

// autoLimit is the limit of a step.
func (m *model) autoLimit() time.Duration {
	if len(m.steps) < 3 {
		return 30 * time.Minute
	}
	longest := time.Duration(0)
	for _, took := range m.steps {
		longest = max(took, longest-longest/1024)
	}
	return max(30*time.Second, 10*m.median(), 3*longest)
}

// part finds a member that asks for the quorum of a step in which the others wait for it.
func (m *model) part(now time.Time) {
	if m.reported {
		return
	}
	for _, id := range m.members() {
		for _, peer := range m.members() {
			p, answered := m.answers[peer]
			if m.waits(id) && answered && p.Progress.Waits && p.Progress.Step >= m.newest(id).Member.Step &&
				m.healthy(peer, now) && !m.waits(peer) {
				m.ends(id, Parted)
				return
			}
		}
	}
}

func (m *model) median() time.Duration {
	last := slices.Sorted(slices.Values(m.steps[max(0, len(m.steps)-64):]))
	if len(last) == 0 {
		return 0
	}
	return last[len(last)/2]
}
