package manager

// BreakMachine makes the next use of the server's machine panic, as a bug in it would.
func (s *Server) BreakMachine() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.machine = nil
}

// RankCounters has the metric of each name that ranks may say.
func RankCounters() map[string]string {
	metrics := map[string]string{}
	for name, c := range rankCounters {
		metrics[name] = c.metric
	}
	return metrics
}
