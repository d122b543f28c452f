package sim

import (
	"flag"
	"os"
	"runtime/debug"
	"testing"
)

func TestMain(m *testing.M) {
	// A run has a small heap and produces much garbage: with Go's default, which collects at four megabytes, half of the time would
	// be spent on that.
	debug.SetGCPercent(1600)
	flag.Parse()
	if run := flag.Lookup("test.run"); *seedFlag >= 0 && run.Value.String() == "" {
		if err := run.Value.Set("^TestSeed$"); err != nil { // -seed selects one history
			panic(err)
		}
	}
	os.Exit(m.Run())
}
