package sim

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// story is a history that was played.
type story struct {
	result
	setup   setup
	lines   []string
	log     []string
	elapsed time.Duration
}

// play plays a history in a bubble.
func play(t *testing.T, s setup) (st story) {
	synctest.Test(t, func(t *testing.T) {
		j := newJob(t, s)
		j.lighthouse.begin()
		for slot := range s.slots {
			j.after(time.Duration(slot)*30*time.Millisecond, func() { j.begin(slot) })
		}
		j.running.Add(1)
		j.tasks.Go(j.schedule)
		j.untilSettled()
		j.end()
		st = story{j.judge.result, s, j.lines, strings.Split(strings.TrimSpace(j.cluster.Log.String()), "\n"),
			time.Since(j.start)}
	})
	return st
}

// longest bounds the duration of a history.
const longest = 30 * time.Minute

// untilSettled waits until all faults are over and the job has settled, or until a rule is broken.
func (j *job) untilSettled() {
	for calm := 0; calm < 8; {
		time.Sleep(500 * time.Millisecond)
		status := j.lighthouse.status()
		settled, broken := false, false
		j.note(func(judge *judge) {
			judge.ticked(status)
			settled = judge.settled()
			if judge.now > longest {
				why, id := judge.apart()
				judge.waits("the history has not ended after %s: %q, quorum %d, the lighthouse is reached "+
					"by all: %t", longest, why, id, judge.home())
			}
			broken = judge.result.broken != nil
		})
		if broken {
			return
		}
		if calm++; !settled || j.running.Load() > 0 {
			calm = 0
		}
	}
}

// end shuts all groups and the lighthouse down in order.
func (j *job) end() {
	var groups []*group
	j.note(func(judge *judge) {
		judge.over = true
		groups = append(groups, j.groups...)
	})
	for _, g := range groups {
		if g != nil {
			how := leave
			if j.setup.seed%2 == 1 {
				how = crash
			}
			g.end(how, "the history is over", time.Hour)
		}
	}
	time.Sleep(j.setup.policy.HeartbeatTimeout + 2*time.Second)
	j.lighthouse.end()
	j.stop()
	j.tasks.Wait()
}

// print returns a history as text: the job, its faults, and the last events.
func (st story) print(most int) string {
	s := st.setup
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d: %d groups of %d ranks, state on disk: %t, min_replicas %d, join %s, "+
		"heartbeat %s, quorum %s, timeout %s, step %s, init_sync %t, replay %t\n",
		s.seed, s.slots, s.ranks, s.disk, s.policy.MinReplicas, s.policy.JoinTimeout,
		s.policy.HeartbeatTimeout, s.quorumTimeout, s.timeout, s.compute, s.initSync, s.replay)
	for _, f := range s.faults {
		fmt.Fprintf(&b, "%s\n", f)
	}
	tail := func(lines []string) {
		if n := len(lines) - most; n > 0 {
			fmt.Fprintf(&b, "… %d lines\n", n)
			lines = lines[n:]
		}
		fmt.Fprintf(&b, "%s\n", strings.Join(lines, "\n"))
	}
	tail(st.lines)
	fmt.Fprintln(&b, "what the servers logged:")
	tail(st.log)
	return b.String()
}

// hold plays a history, and fails the test if a rule does not hold in it.
func hold(t *testing.T, s setup) story {
	t.Helper()
	st := play(t, s)
	if b := st.broken; b != nil {
		t.Fatalf("%v\nagain: go test ./sim -seed %d\n%s", b, s.seed, st.print(*linesFlag))
	}
	return st
}
