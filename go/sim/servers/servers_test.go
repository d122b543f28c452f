package servers

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/torchft/torchft/go/internal/testmain"
	"github.com/torchft/torchft/go/sim"
)

func TestMain(m *testing.M) { testmain.Run(m) }

var (
	seedFlag   = flag.Int64("seed", -1, "play the history of this seed only, and print it (TestSeed)")
	linesFlag  = flag.Int("lines", 60, "lines of a history that are printed, and of the servers' log")
	roundsFlag = flag.Int("rounds", 60, "quorums of one history")
	seedsFlag  = flag.Int("seeds", 120, "histories of TestTheRulesHold")
	soakFlag   = flag.Duration("soak", 0, "play histories for so long (TestSoak)")
)

// draw returns the setup of a seed: the simulation's setup, with times adapted to the constants of the servers.
func draw(seed uint64, rounds int) sim.Setup {
	s := sim.Draw(seed, 2+int(seed%4), rounds)
	r := rand.New(rand.NewPCG(seed, 6))
	between := func(least, most time.Duration) time.Duration {
		return least + time.Duration(r.Int64N(int64(most-least)+1))
	}
	s.Loss, s.Duplicate, s.Straggle, s.Upstream, s.Calls, s.Replay, s.Cluster = 0, 0, 0, 0, 0, false, false
	s.Policy.MinReplicas = 1 + r.IntN(s.Slots/2+1)
	s.Policy.JoinTimeout = between(2*time.Second, 4*time.Second)
	s.Policy.HeartbeatTimeout = between(2*time.Second, 5*time.Second)
	s.Policy.SuspectGrace = 200 * time.Millisecond
	s.QuorumTick = 100 * time.Millisecond
	s.QuorumTimeout = between(20*time.Second, 40*time.Second)
	s.Timeout = s.Policy.HeartbeatTimeout + between(3*time.Second, 8*time.Second)
	s.Compute = between(200*time.Millisecond, 600*time.Millisecond)
	s.Heal = between(0, time.Second)
	s.Delay = between(200*time.Microsecond, 10*time.Millisecond)
	s.Slack = 40 * time.Second // twice the time until a silent connection is closed
	s.DrawFaults(4)
	switch seed % 6 {
	case 0:
		s.Faults = processesEnd(r, &s)
	case 2, 5:
		s.Faults = aroundTheLighthouse(r, &s)
	}
	return s
}

// processesEnd returns a schedule in which all faults are ends of processes, of any number of groups at once, with time to settle
// in between.
func processesEnd(r *rand.Rand, s *sim.Setup) (faults []sim.Fault) {
	for round := 5; round < s.Rounds; round += 6 + r.IntN(6) {
		faults = append(faults, sim.Fault{
			Round: round, After: time.Duration(r.Int64N(int64(4 * s.Compute))), Kind: sim.Crash,
			For: time.Duration(r.Int64N(int64(15 * time.Second))), Slots: sim.Slots(1 + r.IntN(1<<s.Slots-1)),
		})
	}
	return faults
}

// aroundTheLighthouse returns a schedule of long cuts from the lighthouse and of its ends, with time to settle in between.
func aroundTheLighthouse(r *rand.Rand, s *sim.Setup) (faults []sim.Fault) {
	kinds := []sim.FaultKind{
		sim.KillLighthouse, sim.VanishLighthouse, sim.CutLighthouse, sim.CutLighthouse, sim.CutLighthouse, sim.CutUp, sim.CutDown, sim.Vanish,
	}
	for round := 5; round < s.Rounds; round += 4 + r.IntN(12) {
		f := sim.Fault{
			Round: round, After: time.Duration(r.Int64N(int64(4 * s.Compute))), Kind: kinds[r.IntN(len(kinds))],
			For: time.Duration(r.Int64N(int64(15 * time.Second))),
		}
		switch f.Kind {
		case sim.KillLighthouse, sim.VanishLighthouse:
			f.For *= 1 + time.Duration(r.IntN(4))
		case sim.Vanish:
			f.Slots = 1 << r.IntN(s.Slots)
		default:
			f.For *= 1 + time.Duration(r.IntN(4))
			f.Slots = sim.Slots(1 + r.IntN(1<<s.Slots-1))
		}
		faults = append(faults, f)
	}
	return faults
}

// story is the result of a history.
type story struct {
	sim.Result
	lines   []string
	log     []string
	elapsed time.Duration
}

// play runs a history in a bubble.
func play(t *testing.T, s sim.Setup) (st story) {
	synctest.Test(t, func(t *testing.T) {
		j := newJob(t, s)
		j.lighthouse.begin()
		for slot := range s.Slots {
			j.after(time.Duration(slot)*30*time.Millisecond, func() { j.begin(slot) })
		}
		j.running.Add(1)
		j.tasks.Go(j.schedule)
		j.untilSettled()
		j.end()
		st = story{j.judge.Result(), j.lines, strings.Split(strings.TrimSpace(j.cluster.Log.String()), "\n"), time.Since(j.start)}
	})
	return st
}

// longest bounds the duration of a history.
const longest = 30 * time.Minute

// untilSettled waits until all faults are over and the job has settled, or until a rule is broken.
func (j *job) untilSettled() {
	for calm := 0; calm < 8; {
		time.Sleep(500 * time.Millisecond)
		settled, broken := false, false
		j.note(func(judge *sim.Judge) {
			settled = judge.Settled()
			if time.Since(j.start) > longest {
				judge.Break("the history has not ended after %s: %s", longest, judge.Apart())
			}
			broken = judge.Result().Broken != nil
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
	j.note(func(judge *sim.Judge) { groups = append(groups, j.groups...) })
	for _, g := range groups {
		if g != nil {
			how := sim.Leave
			if j.setup.Seed%2 == 1 {
				how = sim.Crash
			}
			g.end(how, "the history is over", time.Hour)
		}
	}
	time.Sleep(j.setup.Policy.HeartbeatTimeout + 2*time.Second)
	j.lighthouse.end()
	j.stop()
	j.tasks.Wait()
}

func (st story) print(s sim.Setup, most int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d: %d groups of %d ranks, state on disk: %t, min_replicas %d, join %s, heartbeat %s, quorum %s, timeout %s, step %s\n",
		s.Seed, s.Slots, s.Ranks, s.Disk, s.Policy.MinReplicas, s.Policy.JoinTimeout, s.Policy.HeartbeatTimeout, s.QuorumTimeout, s.Timeout, s.Compute)
	for _, f := range s.Faults {
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
func hold(t *testing.T, s sim.Setup) story {
	t.Helper()
	st := play(t, s)
	if b := st.Broken; b != nil {
		t.Fatalf("%v\nagain: go test ./sim/servers -seed %d -rounds %d\n%s", b, s.Seed, s.Rounds, st.print(s, *linesFlag))
	}
	return st
}

func TestTheRulesHold(t *testing.T) {
	seeds := *seedsFlag
	if testmain.Race() {
		seeds = min(seeds, 12)
	}
	var rounds, faults, heals int
	var elapsed time.Duration
	for seed := range uint64(seeds) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			st := hold(t, draw(seed, *roundsFlag))
			rounds, faults, heals, elapsed = rounds+st.Rounds, faults+st.FaultsHit, heals+int(st.Heals), elapsed+st.elapsed
		})
	}
	t.Logf("%d histories: %d quorums, %d faults, %d heals, in %s of their own time", seeds, rounds, faults, heals, elapsed.Round(time.Second))
}

// TestSeed plays one history: go test ./sim/servers -run Seed -seed N
func TestSeed(t *testing.T) {
	if *seedFlag < 0 {
		t.Skip("-seed names none")
	}
	s := draw(uint64(*seedFlag), *roundsFlag)
	t.Log(hold(t, s).print(s, *linesFlag))
}

// TestSoak plays histories for -soak, from -seed on, or from a random one.
func TestSoak(t *testing.T) {
	if *soakFlag == 0 {
		t.Skip("-soak says how long")
	}
	first := rand.Uint64() >> 16
	if *seedFlag >= 0 {
		first = uint64(*seedFlag)
	}
	start := time.Now()
	var rounds, faults, seed uint64
	for ; time.Since(start) < *soakFlag; seed++ {
		st := hold(t, draw(first+seed, *roundsFlag))
		rounds, faults = rounds+uint64(st.Rounds), faults+uint64(st.FaultsHit)
	}
	fmt.Printf("%s: seeds %d to %d, %d quorums, %d faults, no rule broken\n",
		time.Since(start).Round(time.Second), first, first+seed-1, rounds, faults)
}
